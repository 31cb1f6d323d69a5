"""One parameter that two pipeline stages have, each with an optimizer of its own: an embedding that is tied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import ShardingError
from shardckpt.testing import RankError
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

#: What the stages of a model of two layers have; the whole model on one rank.
STAGES = (("embedding", "0"), ("1", "embedding"))
WHOLE = ("embedding", "0", "1")


class Part(nn.Module):
    """Some modules of a model, by their names in the whole; no ModuleDict, which fully_shard of torch 2.10 refuses."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, module in parts.items():
            self.add_module(name, module)


def _job(
    seed: int, steps: int, tags: tuple[int, int] = (0, 0), grad: float = 1.0
) -> tuple[Part, torch.optim.Optimizer]:
    """The part of this rank, one of two stages on one rank or two, and its optimizer; ``grad`` is of the second one."""
    torch.manual_seed(seed)
    model = {name: nn.Linear(4, 4, bias=name != "embedding") for name in WHOLE}
    size = dist.get_world_size()
    stage = dist.get_rank() * 2 // size
    part = Part({name: model[name] for name in (WHOLE if size == 1 else STAGES[stage])})
    if size == 4:
        fully_shard(part, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"])
    optimizer = torch.optim.AdamW([{"params": list(part.parameters()), "tag": tags[stage]}])
    for step in range(steps):
        for name, param in part.named_parameters():
            param.grad = torch.full_like(param, (len(name) + step) * (grad if stage else 1.0))
        optimizer.step()
    return part, optimizer


def _read(part: Part, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, param in part.named_parameters():
        found |= {name: param.detach()} | {f"{name}.{slot}": value for slot, value in optimizer.state[param].items()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.tolist() for name, value in whole.items()} | {"tag": optimizer.param_groups[0]["tag"]}


def _save(path: Path, *options: Any) -> dict[str, Any]:
    job = _job(1, 3, *options)
    dist_checkpointing.save(to_sharded_state_dict(*job), path)
    return _read(*job)


def _resume(path: Path) -> dict[str, Any]:
    job = _job(2, 0)
    load_into(dist_checkpointing.load(to_sharded_state_dict(*job), path, on_unused="error"), *job)
    return _read(*job)


@table("number", [2, 4])
def test_both_stages_get_the_one_that_is_stored(ranks: Ranks, tmp_path: Path, number: int) -> None:
    """Weights, state and options come back on each stage, sharded over meshes of their own, and on one rank."""
    saved = ranks.run(number, _save, tmp_path / "c")
    assert ranks.run(number, _resume, tmp_path / "c") == saved
    assert ranks.run(2, _resume, tmp_path / "c") == [saved[0], saved[-1]]
    assert ranks.run(1, _resume, tmp_path / "c") == [saved[0] | saved[-1]]


def test_stages_keep_their_own_options(ranks: Ranks, tmp_path: Path) -> None:
    """Each stage gets those of its own group; where one group has the parameters of both, the error names two."""
    saved = ranks.run(2, _save, tmp_path / "c", (5, 6))
    assert ranks.run(2, _resume, tmp_path / "c") == saved
    assert [each["tag"] for each in saved] == [5, 6]
    with pytest.raises(RankError, match=r"'1.weight'.* are in one group .*different values of tag: ") as error:
        ranks.run(1, _resume, tmp_path / "c")
    assert "group them as they were saved" in str(error.value)


@table("number", [2, 4])
def test_what_is_not_the_same_on_both_is_refused(ranks: Ranks, tmp_path: Path, number: int) -> None:
    """An embedding whose gradients the stages have not added up: the save names it, and stores neither."""
    with pytest.raises(RankError, match=r"'optimizer\.state\.embedding\.weight\.exp_avg': one value on rank 0"):
        ranks.run(number, _save, tmp_path / "c", (0, 0), 2.0)
    assert not (tmp_path / "c").exists()


def test_one_rank_has_it_in_one_optimizer() -> None:
    """Two stages on one rank have one tensor: in the optimizers of both, it is refused by name."""
    embedding = nn.Linear(4, 4)
    parts = [nn.ModuleDict({"embedding": embedding, name: nn.Linear(4, 4)}) for name in "01"]
    first, second = (torch.optim.AdamW(part.parameters()) for part in parts)
    with pytest.raises(
        ShardingError, match=r"'embedding\.weight' is in optimizer 0 and in optimizer 1: leave it in one"
    ):
        to_sharded_state_dict(parts, first, second)
    second = torch.optim.AdamW(parts[1]["1"].parameters())
    assert to_sharded_state_dict(parts, first, second)["model"].keys() >= {"embedding.weight", "0.weight", "1.weight"}

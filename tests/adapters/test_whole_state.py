"""State that each rank has whole beside a sharded parameter comes back whole, whatever its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

ROWS, COLUMNS = 4, 6
SHAPES = {
    "none of its sizes": (5,),
    "rows": (ROWS,),
    "columns": (COLUMNS,),
    "a row": (1, COLUMNS),
    "its own": (ROWS, COLUMNS),
    "transposed": (COLUMNS, ROWS),
    "more axes": (2, ROWS, 3),
    "more": (ROWS * 3, COLUMNS),
    "one number": (1,),
    "empty": (0, COLUMNS),
}


class Whole(torch.optim.SGD):
    """Has one plain tensor for each parameter, made from its number of steps alone."""

    shape: tuple[int, ...] = ()

    def step(self, closure: Any = None) -> None:
        """Count in the tensor, in its first place too, and move the parameters by its sum."""
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            whole = state.setdefault("whole", torch.arange(torch.Size(self.shape).numel()).view(self.shape) * 1.0)
            whole += 1
            with torch.no_grad():
                param.add_(float(whole.sum()) / 1000)


def _job(shape: tuple[int, ...]) -> tuple[Any, Whole]:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(COLUMNS, ROWS)))
    optimizer = Whole(model.parameters(), lr=0.1)
    optimizer.shape = shape
    return model, optimizer


def _save(kind: str, path: Path) -> None:
    job = _job(SHAPES[kind])
    job[1].step()
    dist_checkpointing.save(to_sharded_state_dict(*job), path)


def _resume(kind: str, path: Path) -> None:
    uninterrupted, job = _job(SHAPES[kind]), _job(SHAPES[kind])
    for each in (0, 1):
        uninterrupted[1].step()
        if not each:
            load_into(dist_checkpointing.load(to_sharded_state_dict(*job), path, on_unused="error"), *job)
            job[1].step()
    for here, there in zip(job[0].parameters(), uninterrupted[0].parameters(), strict=True):
        whole = job[1].state[here]["whole"]
        assert not isinstance(whole, DTensor), whole
        assert torch.equal(whole, uninterrupted[1].state[there]["whole"]), (dist.get_rank(), whole)
        assert torch.equal(here.to_local(), there.to_local())


@table("kind", list(SHAPES))
def test_whole_state_stays_whole(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """A fresh optimizer under FSDP2, of more ranks and of fewer, goes on as one that was not interrupted."""
    for saved, resumed in ((2, 2), (2, 1), (1, 2)):
        ranks.run(saved, _save, kind, tmp_path / f"{saved}-{resumed}")
        ranks.run(resumed, _resume, kind, tmp_path / f"{saved}-{resumed}")


def _save_local(path: Path, check_replicas: bool) -> None:
    model, optimizer = _job(())
    for param in model.parameters():
        optimizer.state[param]["rows"] = torch.full((ROWS // 2,), float(dist.get_rank()))
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer, check_replicas=check_replicas), path)


@table("check_replicas", [True, False])
def test_state_of_each_ranks_rows_is_refused(ranks: Ranks, tmp_path: Path, check_replicas: bool) -> None:
    """Plain tensors beside a sharded parameter that differ between ranks are never saved as one rank's for all."""
    outcomes = ranks.outcomes(2, _save_local, tmp_path / "c", check_replicas)
    assert {outcome.kind for outcome in outcomes} == {"ShardingError"}
    assert "'optimizer.state.0.weight.rows': one value on rank 0 / one value on rank 1" in outcomes[0].message
    assert "check_replicas=False" not in outcomes[0].message
    assert not (tmp_path / "c").exists()

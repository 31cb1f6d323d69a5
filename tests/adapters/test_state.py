"""State dicts described as they are: their form, their keys, and tensors that are whole on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import ShardingError
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from tests import backends
from tests.adapters.layouts import S0, values
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _nest() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(values((4, 2)), mesh, [S0])
    state = {"state": {0: {"exp_avg": weight, "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 1)}]}
    found = to_sharded_state_dict(state, prefix="optimizer.")
    inner = found["state"][0]
    return (
        inner["exp_avg"].key,
        inner["step"].key,
        inner["step"].replicated,
        found["groups"],
        state["state"][0]["exp_avg"] is weight,  # type: ignore[index]
    )


def test_a_nest_keeps_its_form_and_names_tensors_by_their_path(ranks: Ranks) -> None:
    """Keys are the prefix and the dotted path; plain tensors are replicated; other leaves are common state."""
    for average, step, replicated, groups, untouched in ranks.run(2, _nest):
        assert average == "optimizer.state.0.exp_avg"
        assert step == "optimizer.state.0.step"
        assert replicated is True
        assert groups == [{"lr": 0.1, "betas": (0.9, 1)}]
        assert untouched


def test_shards_that_are_described_already_stay() -> None:
    """A state dict may mix DTensors with ShardedTensors of the caller's own."""
    own = ShardedTensor.from_rank_offsets("own", torch.zeros(2))

    assert to_sharded_state_dict({"a": own})["a"] is own


@table(
    ("arguments", "reason"),
    [
        (({}, "model."), "expected an optimizer, got a str: .*prefix= as a keyword"),
        (
            ({}, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])),
            "optimizers are described only with their modules",
        ),
        ((torch.ones(2),), "a state dict, a module or a list of modules, got a Tensor"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple[Any, ...], reason: str) -> None:
    """What is no state, module or optimizer is an error that says what is expected."""
    with pytest.raises(ShardingError, match=reason):
        to_sharded_state_dict(*arguments)


@backends.both
def test_an_object_under_many_keys_is_loaded_by_each(tmp_path: Path) -> None:
    """One object that is described under many keys, as an optimizer's options are, comes back under each, as it is."""
    options = {"lr": 0.1, "betas": (0.9, 0.95)}
    state = {key: ShardedObject(key, options, (1,), (0,)) for key in ("a", "b")}
    for step in range(2):  # the second save has a cached plan
        options["lr"] = 0.1 * step
        dist_checkpointing.save({**state, "plain": PlainObject("plain", options)}, tmp_path / str(step))
        loaded = dist_checkpointing.load(dict(state), tmp_path / str(step))
        assert loaded == {"a": options, "b": options}


def _stage(directory: Path) -> list[float]:
    """Each rank has a tensor of its own name, and one that ranks 1 and 2 share."""
    rank = dist.get_rank()
    state = {f"layer{rank}": torch.full((3,), float(rank))}
    if rank:
        state["tied"] = torch.full((2,), 5.0)
    dist_checkpointing.save(to_sharded_state_dict({"stage": state}), directory)
    for tensor in state.values():
        tensor.zero_()
    dist_checkpointing.load(to_sharded_state_dict({"stage": state}), directory, strict=True)
    return [tensor[0].item() for tensor in state.values()]


def test_a_plain_tensor_may_be_on_some_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Of pipeline stages each stores its own tensors, and the lowest rank that has a shared one stores that."""
    assert ranks.run(3, _stage, tmp_path / "ckpt") == [[0.0], [1.0, 5.0], [2.0, 5.0]]
    assert sorted(dist_checkpointing.load_tensors_metadata(tmp_path / "ckpt")) == [
        "stage.layer0",
        "stage.layer1",
        "stage.layer2",
        "stage.tied",
    ]


def _rank_dependent(directory: Path, check_replicas: bool) -> None:
    state = {"same": torch.ones(2), "mean": torch.full((2,), float(dist.get_rank() > 1))}
    dist_checkpointing.save(to_sharded_state_dict(state, check_replicas=check_replicas), directory)


def test_plain_tensors_that_differ_are_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """A plain tensor with other values on other ranks is not stored by one of them: the error names it and them."""
    outcomes = ranks.outcomes(3, _rank_dependent, tmp_path / "ckpt", True)

    assert [outcome.kind for outcome in outcomes] == ["ShardingError"] * 3
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "'mean': one value on rank 0, 1 / one value on rank 2" in outcomes[0].message
    assert "check_replicas=False" in outcomes[0].message
    assert "'same'" not in outcomes[0].message
    assert not (tmp_path / "ckpt").exists()


class _LocalExperts(nn.Module):
    """A norm whose statistics are each rank's, a table of the same kind, and experts that each rank has its own of."""

    def __init__(self, local: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 4)
        self.register_buffer("codes", torch.full((3, 4), float(dist.get_rank())))
        torch.manual_seed(dist.get_rank() if local else 0)
        self.experts = nn.Linear(4, 4)
        self.norm(torch.randn(5, 4) + dist.get_rank())


def _save_experts(directory: Path, local: bool, with_optimizer: bool) -> None:
    model = _LocalExperts(local)
    optimizers = [torch.optim.Adam(model.parameters())] if with_optimizer else []
    if with_optimizer:
        model.experts(torch.ones(2, 4)).sum().backward()
        optimizers[0].step()
    dist_checkpointing.save(to_sharded_state_dict(model, *optimizers, check_replicas=False), directory)


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_local_experts_are_not_lost_on_request(ranks: Ranks, tmp_path: Path, with_optimizer: bool) -> None:
    """``check_replicas=False`` takes any rank's buffers and vectors, and refuses weights that are each rank's own."""
    ranks.run(2, _save_experts, tmp_path / "ckpt", False, with_optimizer)
    prefix = "model." if with_optimizer else ""
    assert dist_checkpointing.load_plain_tensors(tmp_path / "ckpt")[f"{prefix}codes"].eq(0).all()
    outcomes = ranks.outcomes(2, _save_experts, tmp_path / "experts", True, with_optimizer)
    assert {outcome.kind for outcome in outcomes} == {"ShardingError"}
    assert f"'{prefix}experts.weight'" in outcomes[1].message
    assert "shardckpt_ep.expert_layouts" in outcomes[1].message
    for name in ("norm", "up", "codes", "experts.bias"):
        assert name not in outcomes[1].message
    assert not (tmp_path / "experts").exists()


@pytest.mark.parametrize("prefix", [None, 0, ("model.",)])
def test_a_prefix_is_text(prefix: Any) -> None:
    """A prefix that is none is an error: the keys of None began with "None"."""
    with pytest.raises(ShardingError, match=r"^prefix=.*: give the text before every key"):
        to_sharded_state_dict(nn.Linear(2, 2), prefix=prefix)

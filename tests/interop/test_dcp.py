from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardckpt import dist_checkpointing as dc
from shardckpt import mapping
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import UnsafePickleError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt_torch_dist import ShardedLoadPlanner, ShardedSavePlanner
from tests.interop import sample
from tests.states import rank_and_size, run_here
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


class Recipe:
    """A value of a user's own class."""

    def __init__(self, name: str) -> None:
        self.name = name


def _numbers(*shape: int, first: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) + first).reshape(shape).to(dtype)


# What plain DCP saved, read here.

PLAIN_TENSORS = {
    "model.rows": _numbers(7, 3),
    "model.columns": _numbers(4, 6, first=3, dtype=torch.bfloat16),
    "model.bias": _numbers(5, first=9),
    "model.scale": torch.tensor(2.5),
    "optimizer.moments.0": _numbers(2, 2, first=1),
    "optimizer.moments.1": _numbers(3, first=2, dtype=torch.int64),
    "mixed.1": _numbers(2, first=4),
}
PLAIN_VALUES = {
    "optimizer": {"lr": 0.1, "steps": [1, 2, 3], "betas": (0.9, 0.95), "groups": [{"decay": 0.5}, {"decay": 0.0}]},
    "epoch": 3,
    "name": "run",
    "nothing": None,
}


def _plain_state(full: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A state dict as plain PyTorch jobs have it: DTensors where there is a group, tensors, lists and numbers."""

    def sharded(key: str, dim: int) -> torch.Tensor:
        if not dist.is_initialized():
            return full[key]
        return distribute_tensor(full[key], init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])

    return {
        "model": {
            "rows": sharded("model.rows", 0),
            "columns": sharded("model.columns", 1),
            "bias": full["model.bias"],
            "scale": full["model.scale"],
        },
        **PLAIN_VALUES,
        "optimizer": {
            **PLAIN_VALUES["optimizer"],
            "moments": [full["optimizer.moments.0"], full["optimizer.moments.1"]],
        },
        "mixed": [0.25, full["mixed.1"], "end"],
    }


def _dcp_save(path: str) -> None:
    dcp.save(_plain_state(PLAIN_TENSORS), checkpoint_id=path)


def _load_plain_state(path: str) -> None:
    """Load all of it, in place, through the descriptions of DTensors and tensors."""
    blank = {key: torch.full_like(tensor, -1) for key, tensor in PLAIN_TENSORS.items()}
    memory = _plain_state(blank)
    loaded = dc.load(to_sharded_state_dict(memory), path, strict="raise_all")
    expected = _plain_state(PLAIN_TENSORS)
    assert loaded["mixed"][0] == 0.25
    assert loaded["mixed"][2] == "end"
    for key in ("rows", "columns"):
        if isinstance(memory["model"][key], DTensor):
            assert loaded["model"][key] is memory["model"][key]
            for nest in (loaded, memory, expected):
                nest["model"][key] = nest["model"][key].to_local()
    sample.check_equal(loaded, expected, "loaded")
    sample.check_equal(memory["model"], expected["model"], "memory")


@pytest.mark.parametrize("writers", [0, 2])
def test_a_plain_dcp_directory_loads_here(ranks: Ranks, tmp_path: Path, writers: int) -> None:
    """What dcp.save wrote, alone or at 2 ranks, loads at 1 and 3 ranks: DTensors, tensors, numbers and lists."""
    path = str(tmp_path / "plain")
    (ranks.run if writers else run_here)(writers, _dcp_save, path)
    assert not dc.check_is_distributed_checkpoint(path)
    for world in (1, 3):
        ranks.run(world, _load_plain_state, path)
    tensors = dc.load_plain_tensors(path)
    assert set(tensors) == set(PLAIN_TENSORS)
    sample.check_equal(tensors, PLAIN_TENSORS, "tensors")
    shapes = {key: (shard.global_shape, shard.dtype) for key, shard in dc.load_tensors_metadata(path).items()}
    assert shapes == {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in PLAIN_TENSORS.items()}
    sample.check_equal(dc.load_common_state_dict(path), {**PLAIN_VALUES, "mixed": [0.25, "end"]}, "common")


# Our planners, handed to plain DCP.


def _mixed_state(*, filled: bool) -> dict[str, Any]:
    """Shards, objects, DTensors, tensors and numbers, in dicts and in lists."""
    rank, world = rank_and_size()

    def numbers(*shape: int, first: int) -> torch.Tensor:
        return _numbers(*shape, first=first) if filled else torch.full(shape, -1.0)

    def rows(key: str, full: torch.Tensor) -> ShardedTensor:
        low, high = (full.shape[0] * index // world for index in (rank, rank + 1))
        shape = (high - low, *full.shape[1:])
        return ShardedTensor(key, full[low:high].clone(), full.dtype, shape, tuple(full.shape), (low, 0), None)

    dtensor = numbers(6, 2, first=7)
    if dist.is_initialized():
        dtensor = distribute_tensor(dtensor, init_device_mesh("cpu", (world,)), [Shard(0)])
    place = (rank % 2,)
    return {
        "model": {
            "rows": rows("rows", numbers(7, 3, first=1)),
            "copies": ShardedTensor.from_rank_offsets("copies", numbers(2, 3, first=5), replica_id=rank),
            "dtensor": dtensor,
            "plain": numbers(3, first=6),
        },
        "list": [0.5 if filled else 0.0, rows("listed", numbers(4, 2, first=8)), 7 if filled else 0],
        "tensors": [rows("more", numbers(5, 1, first=3)), numbers(2, first=2), "x" if filled else ""],
        "objects": [ShardedObject("rng", {"place": i} if filled else None, (2,), (i,), rank) for i in range(2)],
        "mine": ShardedObject("turn", {"at": place} if filled else None, (2,), place, rank // 2) if world > 1 else None,
        "epoch": 3 if filled else 0,
        "optimizer": {"lr": 0.1 if filled else 0.0, "steps": [1, 2] if filled else [], "name": "a" if filled else ""},
    }


def _planner_save(path: str) -> None:
    dcp.save(_mixed_state(filled=True), checkpoint_id=path, planner=ShardedSavePlanner())


def _planner_load(path: str, saved_by: int) -> None:
    """``dcp.load`` with our planner fills shards, objects, DTensors, tensors and numbers in the caller's dict."""
    state, expected = _mixed_state(filled=False), _mixed_state(filled=True)
    for nest in (state, expected):
        if (rank_and_size()[1] > 1) != (saved_by > 1):
            del nest["mine"]
    dcp.load(state, checkpoint_id=path, planner=ShardedLoadPlanner())
    sample.check_equal(_bare(state), _bare(expected), "state")


def _bare(value: Any) -> Any:
    """A nest with the local values in the places of shards, objects and DTensors."""
    if isinstance(value, dict):
        return {key: _bare(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_bare(part) for part in value]
    if isinstance(value, mapping.ShardedBase):
        return value.data
    return value.to_local() if isinstance(value, DTensor) else value


def _load_planned(path: str) -> None:
    """Our load reads what dcp.save wrote with our planner, shards of it described in another way."""
    rank = rank_and_size()[0]
    whole = {
        "rows": _numbers(7, 3, first=1),
        "listed": _numbers(4, 2, first=8),
        "model.dtensor": _numbers(6, 2, first=7),
    }
    wanted = {
        key: ShardedTensor.from_rank_offsets(key, torch.full_like(t, -1), replica_id=rank) for key, t in whole.items()
    }
    objects = [ShardedObject("rng", None, (2,), (i,), rank) for i in range(2)]
    loaded = dc.load({"wanted": wanted, "objects": objects}, path)
    sample.check_equal(loaded["wanted"], whole, "wanted")
    assert loaded["objects"] == [{"place": 0}, {"place": 1}]
    assert loaded["epoch"] == 3
    assert loaded["optimizer"] == {"lr": 0.1, "steps": [1, 2], "name": "a"}


@pytest.mark.parametrize("writers", [0, 4, *in_proof(1)])
def test_planners_serve_plain_dcp(ranks: Ranks, tmp_path: Path, writers: int) -> None:
    """dcp.save and dcp.load with our planners take shards among plain values, and our load reads what they wrote."""
    path = str(tmp_path / "planned")
    (ranks.run if writers else run_here)(writers, _planner_save, path)
    _planner_load(path, writers)
    for readers in (1, 4):
        ranks.run(readers, _planner_load, path, writers)
    ranks.run(3, _load_planned, path)


@pytest.mark.parametrize("stored", [torch.float16, torch.float64])
def test_negated_destinations_of_another_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    """dcp.load with our planner fills a negated view, into which torch's copy_ casts with the wrong signs."""
    values = _numbers(4, 3, first=1, dtype=stored)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    view = torch._neg_view(torch.zeros(4, 3))
    wanted = {"w": ShardedTensor.from_rank_offsets("w", view)}
    dcp.load(wanted, checkpoint_id=tmp_path / "c", planner=ShardedLoadPlanner())
    assert torch.equal(view, values.float())


def _fill_meta_tensors(path: str) -> None:
    dcp.save(_mixed_state(filled=True), checkpoint_id=path, planner=ShardedSavePlanner())
    state = {
        "model": {"plain": torch.empty(3, device="meta")},
        "tensors": [ShardedTensor.from_rank_offsets("more", torch.zeros(5, 1)), torch.empty(2, device="meta"), ""],
    }
    dcp.load(state, checkpoint_id=path, planner=ShardedLoadPlanner())
    tensors = [_numbers(5, 1, first=3), _numbers(2, first=2), "x"]
    sample.check_equal(_bare(state), {"model": {"plain": _numbers(3, first=6)}, "tensors": tensors}, "state")


def test_the_load_planner_fills_meta_tensors(ranks: Ranks, tmp_path: Path) -> None:
    """dcp.load with our planner puts memory in the place of meta tensors, as DCP's own does."""
    ranks.run(1, _fill_meta_tensors, str(tmp_path))


def test_the_load_planner_unpickles_by_the_allow_list(tmp_path: Path) -> None:
    """A plain value of a class that nobody allowed is refused by our planner, and loaded once it is allowed."""
    dcp.save({"recipe": Recipe("a")}, checkpoint_id=str(tmp_path), planner=ShardedSavePlanner())
    with pytest.raises(dcp.api.CheckpointException) as refused:
        dcp.load({"recipe": ""}, checkpoint_id=str(tmp_path), planner=ShardedLoadPlanner())
    assert all(isinstance(failure[0], UnsafePickleError) for failure in refused.value.failures.values())
    state: dict[str, Any] = {"recipe": ""}
    dcp.load(state, checkpoint_id=str(tmp_path), planner=ShardedLoadPlanner(allow_globals=[Recipe]))
    assert state["recipe"].name == "a"

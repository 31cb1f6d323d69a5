from __future__ import annotations

from functools import partial
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
from shardckpt_torch_dist import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
    ShardedLoadPlanner,
    ShardedSavePlanner,
)
from tests.interop import sample
from tests.states import rank_and_size, run_here
from tests.tables import in_proof
from tests.torch_dist import plain_states

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


class Recipe:
    """A value of a user's own class."""

    def __init__(self, name: str) -> None:
        self.name = name


#: The version that is saved.
SAVED = 3

# What plain DCP saved, read here.


def _load_plain_state(path: str) -> None:
    """Load all of it, in place, through the descriptions of DTensors and tensors."""
    memory = plain_states.state(plain_states.BLANK)
    held = memory["model"]["rows"]
    loaded = dc.load(to_sharded_state_dict(memory), path, strict="raise_all")
    assert not isinstance(held, DTensor) or loaded["model"]["rows"] is held
    plain_states.check(loaded, SAVED)


def _dcp_save(path: str) -> None:
    dcp.save(plain_states.state(SAVED), checkpoint_id=path)


@pytest.mark.parametrize("writers", [0, 2])
def test_a_plain_dcp_directory_loads_here(ranks: Ranks, tmp_path: Path, writers: int) -> None:
    """What dcp.save wrote, alone or at 2 ranks, loads at 1 and 3 ranks: DTensors, tensors, numbers and lists."""
    path = str(tmp_path / "plain")
    (ranks.run if writers else run_here)(writers, _dcp_save, path)
    assert not dc.check_is_distributed_checkpoint(path)
    for world in (1, 3):
        ranks.run(world, _load_plain_state, path)
    tensors = dc.load_plain_tensors(path)
    sample.check_equal(tensors, plain_states.tensors(SAVED), "tensors")
    shapes = {key: (shard.global_shape, shard.dtype) for key, shard in dc.load_tensors_metadata(path).items()}
    assert shapes == {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    sample.check_equal(dc.load_common_state_dict(path), plain_states.values(SAVED), "common")


# Our planners, handed to plain DCP.


def _mixed_state(*, filled: bool) -> dict[str, Any]:
    """Shards, objects, DTensors, tensors and numbers, in dicts and in lists."""
    rank, world = rank_and_size()

    def numbers(*shape: int, first: int) -> torch.Tensor:
        return plain_states.numbers(*shape, first=first) if filled else torch.full(shape, -1.0)

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


def _planner_save(path: str, *, ours: bool = False) -> None:
    writer = CheckpointStorageWriter(path) if ours else dcp.FileSystemWriter(path)
    dcp.save(_mixed_state(filled=True), storage_writer=writer, planner=ShardedSavePlanner())


def _planner_load(path: str, saved_by: int, *, ours: bool = False) -> None:
    """``dcp.load`` with our planner fills shards, objects, DTensors, tensors and numbers in the caller's dict."""
    state, expected = _mixed_state(filled=False), _mixed_state(filled=True)
    for nest in (state, expected):
        if (rank_and_size()[1] > 1) != (saved_by > 1):
            del nest["mine"]
    reader = CheckpointStorageReader(path) if ours else dcp.FileSystemReader(path)
    dcp.load(state, storage_reader=reader, planner=ShardedLoadPlanner())
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
        "rows": plain_states.numbers(7, 3, first=1),
        "listed": plain_states.numbers(4, 2, first=8),
        "model.dtensor": plain_states.numbers(6, 2, first=7),
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


@pytest.mark.parametrize(("writers", "ours"), [(0, False), (4, False), (2, True), *in_proof((1, False))])
def test_planners_serve_plain_dcp(ranks: Ranks, tmp_path: Path, writers: int, ours: bool) -> None:
    """dcp.save and dcp.load with our planners, by DCP's storage and ours, take shards among plain values; so do we."""
    path = str(tmp_path / "planned")
    (ranks.run if writers else run_here)(writers, partial(_planner_save, ours=ours), path)
    load = partial(_planner_load, ours=ours)
    load(path, writers)
    for readers in (1, 4):
        ranks.run(readers, load, path, writers)
    ranks.run(3, _load_planned, path)


@pytest.mark.parametrize("stored", [torch.float16, torch.float64])
def test_negated_destinations_of_another_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    """dcp.load with our planner fills a negated view, into which torch's copy_ casts with the wrong signs."""
    values = plain_states.numbers(4, 3, first=1, dtype=stored)
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
    tensors = [plain_states.numbers(5, 1, first=3), plain_states.numbers(2, first=2), "x"]
    sample.check_equal(
        _bare(state), {"model": {"plain": plain_states.numbers(3, first=6)}, "tensors": tensors}, "state"
    )


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

"""Plain torch.distributed.checkpoint as a reader: no planner or class of ours, none of Megatron's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as RowShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.interop import sample

if TYPE_CHECKING:
    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def load(path: str) -> None:
    """``dcp.load`` of the sample into whole tensors and objects; where there is a group, sharded tensors too."""
    state: dict[str, Any] = {**sample.blank_tensors(), **dict.fromkeys(sample.objects(), "")}
    dcp.load(state, checkpoint_id=path)
    sample.check_equal({key: state.pop(key) for key in sample.objects()}, _objects(), "objects")
    sample.check_tensors(state)
    if dist.is_initialized():
        world = dist.get_world_size()
        line = init_device_mesh("cpu", (world,))
        for placement in (Shard(0), Shard(1), Shard(-1), Replicate()):
            _load_dtensors(path, line, placement)
        if world == 4:
            _load_dtensors(path, init_device_mesh("cpu", (2, 2)), Shard(0), Shard(1))
        _load_torch_sharded_tensors(path)


def refusal(path: str) -> str:
    """The errors that ``dcp.load`` of one tensor raises."""
    try:
        dcp.load({"step": sample.blank_tensors()["step"]}, checkpoint_id=path)
    except CheckpointException as exc:  # a BaseException
        return "; ".join(sorted({repr(failure) for failure, _ in exc.failures.values()}))
    return ""


def _load_dtensors(path: str, mesh: DeviceMesh, *placements: Any) -> None:
    """Load every tensor that has the axes into a DTensor, and compare this rank's part."""
    axes = {placement.dim for placement in placements if isinstance(placement, Shard)}
    blank = {key: t for key, t in sample.blank_tensors().items() if all(-t.dim() <= axis < t.dim() for axis in axes)}
    state = {key: _distributed(tensor, mesh, placements) for key, tensor in blank.items()}
    dcp.load(state, checkpoint_id=path)
    whole = sample.whole_tensors()
    for key, loaded in state.items():
        expected = _distributed(whole[key], mesh, placements)
        sample.check_equal(loaded.to_local(), expected.to_local(), f"{key} by {placements}")


def _load_torch_sharded_tensors(path: str) -> None:
    """Load every tensor that has axes into torch's older ShardedTensor, by rows, and compare this rank's part."""
    blank, whole = sample.blank_tensors(), sample.whole_tensors()
    state = {key: _sharded_by_rows(tensor) for key, tensor in blank.items() if tensor.dim()}
    dcp.load(state, checkpoint_id=path)
    for key, loaded in state.items():
        for shard in loaded.local_shards():
            low, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            sample.check_equal(shard.tensor, whole[key][low : low + count], f"{key} by rows")


def _sharded_by_rows(tensor: torch.Tensor) -> ShardedTensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    low, high = (tensor.shape[0] * index // world for index in (rank, rank + 1))
    offsets = [low] + [0] * (tensor.dim() - 1)
    mine = [RowShard.from_tensor_and_offsets(tensor[low:high].clone(), offsets, rank)] if low < high else []
    return init_from_local_shards(mine, *tensor.shape)


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """A DTensor of what this rank has already: gloo does not send float8."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _objects() -> dict[str, Any]:
    """As they are stored: lists of all objects of a rank that share the key."""
    return {key: [value] for key, value in sample.objects().items()}


__all__ = ["load", "refusal"]

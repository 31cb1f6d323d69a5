"""torch.distributed.checkpoint.optimizer by its names: the function, and the helpers that other code imports.

The function does not use the helpers: it loads each state in the layout of its parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shardckpt.compat.torch_private import ChunkShardingSpec, find_group
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError
from shardckpt.optimizer_state import HELPERS, load_sharded_optimizer_state_dict
from shardckpt.planning.boxes import Box
from shardckpt.tensors.torch_private import is_sharded_tensor, read_local_tensor
from shardckpt.validation.sharding import format_box

if TYPE_CHECKING:
    from collections.abc import Mapping

#: By key: the offset of this rank's part of the parameter, or None, and the shape of the part.
STATE_DICT_2D_LAYOUT = dict[str, tuple[Sequence[int] | None, Sequence[int]]]


def _gen_rank_device(global_rank: int, device_type: str = "cuda") -> str:
    """Return the device of a rank: ``"cuda:1"`` for rank 9 of nodes with 8; ``"cpu"`` where there is no such device."""
    if device_type == "cpu":
        return "cpu"
    module = torch.get_device_module(device_type)
    return f"{device_type}:{global_rank % module.device_count()}" if module.is_available() else "cpu"


def _create_colwise_spec(pg: dist.ProcessGroup | None = None) -> Any:
    """Return torch's spec of a tensor that is cut in rows over the ranks of a group; by default over all ranks."""
    pairs = [part.partition(":")[0] for part in str(dist.get_backend_config(pg)).split(",")]
    device_type = "cpu" if "cpu" in pairs else pairs[0]
    ranks = range(dist.get_world_size()) if pg is None else dist.get_process_group_ranks(pg)
    return ChunkShardingSpec(
        dim=0,
        placements=[f"rank:{number}/{_gen_rank_device(rank, device_type)}" for number, rank in enumerate(ranks)],
    )


def _is_nested_tensor(val: Any) -> bool:
    """Return whether a tensor is a ShardedTensor of ShardedTensors: FSDP1 over tensor parallelism.

    One with a DTensor inside, and a DTensor of sharded tensors, are a ValueError.
    """
    if is_sharded_tensor(val):
        first = next((shard.tensor for shard in val.local_shards()), None)
        if isinstance(first, DTensor):
            raise ValueError("a DTensor inside a ShardedTensor is not supported")
        return is_sharded_tensor(first)
    if isinstance(val, DTensor):
        inner = read_local_tensor(val)
        if isinstance(inner, DTensor) or is_sharded_tensor(inner):
            raise ValueError("a DTensor of sharded tensors is not supported")
    return False


def _alloc_tensor(props: Any, size: Sequence[int], device_type: str = "cuda") -> torch.Tensor:
    """Return uninitialised memory with the properties of DCP's metadata, on this process's device of a type.

    Where there is no such device, it is on the CPU.
    """
    device = torch.device("cpu")
    if device_type != "cpu" and torch.get_device_module(device_type).is_available():
        device = torch.device(device_type, torch.get_device_module(device_type).current_device())
    return torch.empty(
        tuple(size),
        dtype=props.dtype,
        layout=props.layout,
        requires_grad=props.requires_grad,
        pin_memory=props.pin_memory,
        device=device,
    )


def _get_state_dict_2d_layout(state_dict: Mapping[str, Any]) -> tuple[STATE_DICT_2D_LAYOUT, dist.ProcessGroup | None]:
    """Return the part of each tensor that this rank's tensor-parallel group has, and the data-parallel group.

    The parts are by key: the offset, or None for a tensor that is not nested, and the shape. The group shards the
    parts; it is None if no tensor is nested. The state dict is FSDP1's sharded one of the model. A nested tensor with
    several shards on this rank is a ShardingError.
    """
    layout: STATE_DICT_2D_LAYOUT = {}
    group = None
    for key, value in state_dict.items():
        layout[key] = (None, value.size())
        if _is_nested_tensor(value):
            shards = value.local_shards()
            if len(shards) != 1:
                raise ShardingError(f"{key!r} has {len(shards)} shards on this rank: a nested ShardedTensor has one")
            layout[key] = (shards[0].metadata.shard_offsets, shards[0].metadata.shard_sizes)
            group = find_group(shards[0].tensor)
    return layout, group


class _ReaderWithOffset(DefaultLoadPlanner):
    """A planner for ``dcp.load`` that reads ShardedTensors from a place inside of larger stored tensors.

    Args:
        fqn_to_offset: The offset in the stored tensor of each ShardedTensor's first element, by key; tensors without an
            offset are read as usual.

    Attributes:
        translation: The index in the ShardedTensor by that in the stored tensor, of the last plan.
    """

    def __init__(self, fqn_to_offset: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.fqn_to_offset = fqn_to_offset
        self.translation: dict[MetadataIndex, MetadataIndex] = {}

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's plan.

        Raises:
            KeyMismatchError: a tensor with an offset is not stored.
            ShardingError: not all of it is, or an object is stored.
        """
        self.translation = {}
        if self.metadata is None:
            raise CheckpointingException("create_local_plan before set_up_planner: let dcp.load call the methods")
        moved = {
            fqn: value
            for fqn, value in self.state_dict.items()
            if fqn in self.fqn_to_offset and is_sharded_tensor(value)
        }
        rest = {fqn: value for fqn, value in self.state_dict.items() if fqn not in moved}
        requests = list(create_default_local_load_plan(rest, self.metadata, not self.allow_partial_load).items)
        for fqn, value in moved.items():
            stored = self.metadata.state_dict_metadata.get(fqn)
            if stored is None:
                raise KeyMismatchError(f"{fqn!r} is not in the checkpoint")
            if not isinstance(stored, TensorStorageMetadata):
                raise ShardingError(f"{fqn!r} is no tensor in the checkpoint")
            for shard in value.local_shards():
                start = MetadataIndex(fqn, torch.Size(shard.metadata.shard_offsets))
                chunk = _move_shard(fqn, shard.metadata, self.fqn_to_offset[fqn], stored.size)
                items = create_read_items_for_chunk_list(fqn, stored, [chunk])
                self.translation |= {item.dest_index: replace(start, index=item.dest_index.index) for item in items}
                requests += items
        return LoadPlan(requests)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor that an index of the plan is about."""
        return super().lookup_tensor(self.translation.get(index, index))


def _move_shard(fqn: str, shard: Any, moved_by: Sequence[int], size: Sequence[int]) -> ChunkStorageMetadata:
    """Return the chunk that a shard is of the stored tensor; ShardingError unless all of it is stored."""
    if not len(shard.shard_offsets) == len(moved_by) == len(size):
        raise ShardingError(f"{fqn!r}: its offset {tuple(moved_by)} is of another tensor: {len(size)} axes are stored")
    box = Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)).moved(moved_by)
    if not box.fits(size):  # DCP would read what both have, and leave the rest of the shard as it was
        raise ShardingError(
            f"{fqn!r}: with its offset {tuple(moved_by)}, a shard is {format_box(box)} of the stored tensor of shape "
            f"{tuple(size)}: pass the offset of the part, as _get_state_dict_2d_layout returns it"
        )
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


__all__ = [*HELPERS, "load_sharded_optimizer_state_dict"]  # noqa: PLE0604 - these are strings

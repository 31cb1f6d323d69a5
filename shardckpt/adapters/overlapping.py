"""Tensors with several elements at one place in memory: expanded ones, or views with strides that overlap."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import ShardingError
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import have_equal_bits

if TYPE_CHECKING:
    from shardckpt.mapping.base import ReplicaId, Replicated


def describe_overlapping(key: str, tensor: torch.Tensor, replicated: Replicated, rank: int) -> ShardedTensorFactory:
    """Describe such a tensor: all its elements are stored; a load fills it if all elements of a place are equal."""
    return ShardedTensorFactory(key, tensor, partial(_build, replicated), partial(_put, key, tensor), replica_id=rank)


def _build(
    replicated: Replicated, key: str, data: torch.Tensor, replica_id: ReplicaId, _: slice | None
) -> list[ShardedTensor]:
    shape, own = tuple(data.shape), data.contiguous()
    offset, grid = (0,) * len(shape), (1,) * len(shape)
    return [ShardedTensor.from_box(key, own, shape, offset, grid, replica_id, replicated=replicated)]


def _put(key: str, tensor: torch.Tensor, loaded: Any) -> torch.Tensor:
    """Copy loaded values into the tensor, first into one of the same strides, which shows whether it can hold them."""
    (values,) = loaded
    span = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    like = torch.empty(span, dtype=tensor.dtype, device=tensor.device).as_strided(tensor.shape, tensor.stride())
    for target in (like, tensor):
        place, source = target, values
        for axis, (step, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
            if not step and size:  # torch copies into no expanded axis
                place, source = place.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
        place.copy_(source)
        if not have_equal_bits(target, values):
            raise ShardingError(
                f"{key!r}: its destination is expanded, or overlaps itself: several elements share their memory, "
                "and the checkpoint has different values for them. Load into its clone(), which has memory for each"
            )
    return tensor

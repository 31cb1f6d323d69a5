"""Any leaf of a state dict as what a save or load takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import describe_dtensor
from shardckpt.adapters.torch_sharded import describe_torch_sharded
from shardckpt.mapping import Replicated, ShardedObject, ShardedTensor
from shardckpt.tensors import is_sharded_tensor


def describe_nest(value: Any, key: str, replicated: Replicated, *, objects: bool) -> Any:
    """A nest of dicts and lists with its leaves described; keys are the path, joined by dots.

    Args:
        value: The nest, or a leaf; it stays as it is.
        key: Path so far.
        replicated: For what is whole on every rank that has it; see ShardedTensor.
        objects: Whether leaves that are no tensors become replicated objects; else they stay, as common state.
    """
    if isinstance(value, dict):
        return {k: describe_nest(v, f"{key}.{k}", replicated, objects=objects) for k, v in value.items()}
    if isinstance(value, list):
        return [describe_nest(v, f"{key}.{i}", replicated, objects=objects) for i, v in enumerate(value)]
    if objects or isinstance(value, torch.Tensor):
        return describe_leaf(value, key, replicated)
    return value


def describe_leaf(value: Any, key: str, replicated: Replicated) -> Any:
    """A tensor of any kind as its shards; anything else as an object that all ranks that have it have alike."""
    if isinstance(value, DTensor):
        return describe_dtensor(key, value, replicated)
    if is_sharded_tensor(value):
        return describe_torch_sharded(key, value, replicated)
    if isinstance(value, torch.Tensor):
        return ShardedTensor.from_rank_offsets(key, value.detach(), replica_id=_rank(), replicated=replicated)
    return describe_object(value, key, replicated)


def describe_object(value: Any, key: str, replicated: Replicated) -> ShardedObject:
    """An object that all ranks that have it have alike."""
    return ShardedObject(key, value, (1,), (0,), _rank(), replicated=replicated)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


__all__ = ["describe_leaf", "describe_nest", "describe_object"]

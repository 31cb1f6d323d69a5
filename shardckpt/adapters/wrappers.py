"""Tensors with others inside (quantized ones): taken apart for a save, and put together after a load.

A plain one and the shards of a DTensor are stored alike: tensors inside that have its shape as they are, others
flattened, each rank's blocks at their place. So a load may have another number of ranks.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import get_element_range, get_local_tensor, get_replica_coordinates
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import dict_list_map_outplace
from shardckpt.tensors import ORDINARY, is_sharded_tensor, kind, read_local_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.mapping import ReplicaId, Replicated

#: The key that marks a dict in the place of a wrapper tensor: the name of its class. It is stored.
CLASS = "shardckpt: a tensor of the class"
#: The key of the tensors inside; no name of a value has parentheses.
INNER = "(inner)"
#: That key in the checkpoints of 27 November 2026.
_OLD_INNER = "inner"
#: Tensors that all blocks share: torchao's tables from codes to values.
_TABLES = frozenset({"qmap"})


@dataclass(frozen=True)
class InnerShard:
    """A rank's blocks of a flattened tensor that is inside the shards of a DTensor.

    Attributes:
        tensor: The blocks.
        size: The number of elements on all ranks.
        offset: Of those before the blocks.
        replica_id: As for ShardedTensor.
    """

    tensor: torch.Tensor
    size: int
    offset: int
    replica_id: ReplicaId

    def describe(self, key: str, replicated: Replicated) -> ShardedTensor:
        """Describe the blocks as a shard."""
        return ShardedTensor.from_box(
            key, self.tensor, (self.size,), (self.offset,), None, self.replica_id, replicated=replicated
        )


def is_wrapper(value: Any) -> bool:
    """Return whether a tensor, or the local tensor of a DTensor, has others inside, as torch's protocol says."""
    if isinstance(value, DTensor):
        if type(read_local_tensor(value)) in ORDINARY:  # nearly all are so
            return False
        value = get_local_tensor(value)
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in ORDINARY
        and not is_sharded_tensor(value)
        and hasattr(value, "__tensor_flatten__")
    )


def flatten_wrappers(state: Any, *, shards: bool = True) -> Any:
    """Return a state with a dict for each wrapper tensor, which has the tensors inside.

    Args:
        state: Nested dicts and lists.
        shards: Whether to take the shards of DTensors apart.

    Raises:
        ShardingError: the shards of a DTensor have tensors inside that cannot be stored as parts of a whole.
    """

    def flatten(leaf: Any) -> Any:
        return _flatten(leaf) if is_wrapper(leaf) and (shards or not isinstance(leaf, DTensor)) else leaf

    return dict_list_map_outplace(flatten, state)


def _flatten(tensor: Any) -> dict[str, Any]:
    if isinstance(tensor, DTensor):
        return _flatten_shard(tensor)
    names, context = tensor.__tensor_flatten__()
    return {
        CLASS: f"{type(tensor).__module__}.{type(tensor).__qualname__}",
        "context": context,
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        # inside may be another
        INNER: {name: flatten_wrappers(getattr(tensor, name)) for name in names},
    }


def _flatten_shard(dtensor: DTensor) -> dict[str, Any]:
    local, shape = get_local_tensor(dtensor), dtensor.shape
    elements = get_element_range(dtensor)
    parts = _flatten(local)

    def place(name: str, inner: Any) -> Any:
        if name in _TABLES:
            return inner
        if type(inner) in ORDINARY and inner.shape == local.shape:
            return DTensor.from_local(
                inner, dtensor.device_mesh, dtensor.placements, run_check=False, shape=shape, stride=dtensor.stride()
            )
        is_flat = type(inner) in ORDINARY and inner.ndim == 1 and local.numel()
        ends = (elements.start, dtensor.numel()) if is_flat and elements is not None else ()
        places = [index * inner.numel() for index in ends]
        if not places or any(index % local.numel() for index in places):
            raise ShardingError(
                f"{name}, inside the shards of a DTensor of {kind(local)}, shape {tuple(shape)}, placements "
                f"{dtensor.placements}, cannot be stored: it must be plain, have the shape of its shard, or be flat "
                "where shards are rows: shard the parameter by its first dimension"
            )
        offset, size = (index // local.numel() for index in places)
        return InnerShard(inner, size, offset, get_replica_coordinates(dtensor) or 0)

    return {
        **parts,
        "context": _replace_shape(parts["context"], local.shape, shape),
        "shape": tuple(shape),
        "stride": tuple(dtensor.stride()),
        INNER: {name: place(name, inner) for name, inner in parts[INNER].items()},
    }


def request_shard(
    key: str, slot: str, shape: tuple[int, ...], dtype: torch.dtype, param: torch.Tensor
) -> InnerShard | None:
    """Return memory for a rank's blocks of a stored flat tensor that was inside another.

    Args:
        key: The key of the tensor.
        slot: Its dotted path in the state.
        shape: Its shape.
        dtype: Its dtype.
        param: The parameter whose state it is.

    Returns:
        The memory; None where all of the tensor is to be loaded.

    Raises:
        ShardingError: this rank's part of the parameter begins or ends within a block.
    """
    *path, name = slot.split(".")
    if path[-1:] != [INNER] or name in _TABLES or len(shape) != 1 or not isinstance(param, DTensor):
        return None
    start, stop = _find_blocks(repr(key), shape[0], param)
    replica_id = get_replica_coordinates(param) or 0
    return InnerShard(torch.empty(stop - start, dtype=dtype, device=param.device), shape[0], start, replica_id)


def _find_blocks(what: str, size: int, param: DTensor) -> tuple[int, int]:
    """Return the first and the end of a rank's blocks; raise ShardingError where its part of the parameter cuts one."""
    elements, number = get_element_range(param), max(1, param.numel())
    if elements is None or elements.start * size % number or elements.stop * size % number:
        raise ShardingError(
            f"{what}: its {size} elements stand for blocks of the parameter, of shape {tuple(param.shape)}, which the "
            f"placements {param.placements} cut between ranks: load it with a number of ranks that leaves blocks whole"
        )
    return elements.start * size // number, elements.stop * size // number


def rebuild_wrapper(parts: Mapping[str, Any], form: Mapping[str, Any], param: torch.Tensor | None) -> Any:
    """Return the wrapper tensor of a dict that :func:`flatten_wrappers` has made.

    Args:
        parts: The dict, with what was loaded for the tensors inside: whole, or this rank's part.
        form: The same with placeholders, which have the shapes of whole ones.
        param: The parameter whose state it is. That of a DTensor's shape is a DTensor.

    Raises:
        CheckpointingException: its class is not imported: a checkpoint must not decide what is.
        ShardingError: this rank's part of the parameter begins or ends within a block.
    """
    module, _, name = parts[CLASS].rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_unflatten__")):
        raise CheckpointingException(
            f"the state has a tensor of the class {parts[CLASS]}, which is not imported: import {module} before the "
            "load (a checkpoint cannot have it imported)"
        )
    key = INNER if INNER in parts else _OLD_INNER
    inner, shape = parts[key], tuple(parts["shape"])
    if not isinstance(param, DTensor) or tuple(param.shape) != shape:
        return cls.__tensor_unflatten__(inner, parts["context"], torch.Size(shape), parts["stride"])
    part = get_local_tensor(param)

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        local, whole = get_local_tensor(tensor).reshape(-1), math.prod(form[key][name][2])
        if name in _TABLES:
            return local
        if local.numel() == whole and part.numel() < param.numel():
            start, stop = _find_blocks(f"{name} of a {parts[CLASS]}", whole, param)
            local = local[start:stop].clone()
        return local.view(part.shape) if local.numel() == part.numel() and whole == param.numel() else local

    wrapper = cls.__tensor_unflatten__(
        {name: cut(name, tensor) for name, tensor in inner.items()},
        _replace_shape(parts["context"], shape, part.shape),
        part.shape,
        part.stride(),
    )
    return DTensor.from_local(
        wrapper, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _replace_shape(context: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    """Return a wrapper's context with another shape in the place of its own."""

    def replace(value: Any) -> Any:
        return type(value)(new) if type(value) in (tuple, torch.Size) and tuple(value) == tuple(old) else value

    if isinstance(context, dict):
        return {key: replace(value) for key, value in context.items()}
    return type(context)(map(replace, context)) if type(context) in (list, tuple) else context

"""Tensors with others inside (quantized ones): taken apart for a save, and put together after a load.

A plain one and the shards of a DTensor are stored alike: tensors inside that have its shape as they are, others
flattened, each rank's blocks at their place. So a load may have another number of ranks. Where its ranks would cut
blocks, torchao quantizes nothing, and the values are loaded.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import (
    get_dtensor_splits,
    get_element_range,
    get_local_tensor,
    get_replica_coordinates,
)
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import dict_list_map_outplace
from shardckpt.tensors import ORDINARY, dequantize, is_sharded_tensor, kind, read_local_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.mapping import ReplicaId, Replicated

logger = logging.getLogger(__name__)

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
    """Return whether a tensor has others inside, as torch's protocol says; or a DTensor's shards, to be stored so."""
    if not isinstance(value, DTensor):
        return _has_inner(value)
    if type(read_local_tensor(value)) in ORDINARY:  # nearly all are so
        return False
    local = get_local_tensor(value)
    if not _has_inner(local):
        return False
    if not _can_be_cut(value, local):
        _warn_of_values(kind(local), tuple(value.shape), str(value.placements))
        return False
    return True


def _has_inner(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in ORDINARY
        and not is_sharded_tensor(value)
        and hasattr(value, "__tensor_flatten__")
    )


def _can_be_cut(dtensor: DTensor, local: Any) -> bool:
    """Return whether each rank's blocks are parts of a whole: of equal shards, that are rows."""
    elements = get_element_range(dtensor)
    # where shards differ, some may be too small to be quantized
    is_even = elements is not None and dtensor.numel() and len(elements) == local.numel() and _is_even(dtensor)
    inner = {name: getattr(local, name) for name in local.__tensor_flatten__()[0] if name not in _TABLES}
    return bool(is_even) and all(
        type(tensor) in ORDINARY
        and (tensor.shape == local.shape or (tensor.ndim == 1 and not dtensor.numel() * tensor.numel() % local.numel()))
        for tensor in inner.values()
    )


def _is_even(dtensor: DTensor) -> bool:
    return all(not dtensor.shape[split.dim] % split.count for split in get_dtensor_splits("", dtensor))


@functools.cache
def _warn_of_values(name: str, shape: tuple[int, ...], placements: str) -> None:
    """Say once that blocks are not stored."""
    logger.warning(
        "optimizer state of the class %s, shape %s, placements %s, is stored dequantized, and a fresh optimizer does "
        "not get its blocks: these can be stored where shards are rows, and of one size",
        name,
        shape,
        placements,
    )


def flatten_wrappers(state: Any, *, shards: bool = True) -> Any:
    """Return a state with a dict for each wrapper tensor, which has the tensors inside.

    Args:
        state: Nested dicts and lists.
        shards: Whether to take the shards of DTensors apart.
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
    elements = get_element_range(dtensor) or range(0)
    parts = _flatten(local)

    def place(name: str, inner: Any) -> Any:
        if name in _TABLES:
            return inner
        if inner.shape == local.shape:
            return DTensor.from_local(
                inner, dtensor.device_mesh, dtensor.placements, run_check=False, shape=shape, stride=dtensor.stride()
            )
        offset, size = (index * inner.numel() // local.numel() for index in (elements.start, dtensor.numel()))
        return InnerShard(inner, size, offset, get_replica_coordinates(dtensor) or 0)

    return {
        **parts,
        "context": _replace_shape(parts["context"], local.shape, shape),
        "shape": tuple(shape),
        "stride": tuple(dtensor.stride()),
        INNER: {name: place(name, inner) for name, inner in parts[INNER].items()},
    }


def is_inner(slot: str) -> bool:
    """Return whether the dotted path of a tensor says that it was inside another."""
    return slot.rpartition(".")[0].rpartition(".")[2] in (INNER, _OLD_INNER)


def request_inner(
    slot: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, param: torch.Tensor
) -> torch.Tensor | InnerShard | None:
    """Return memory for a stored tensor that was inside another: for this rank's blocks, or for all.

    Args:
        slot: The dotted path of the tensor in the state, for which :func:`is_inner` is True.
        shapes: The shapes of all stored tensors of the state.
        dtype: Its dtype.
        param: The parameter whose state it is.

    Returns:
        The memory; None where the tensor is to be loaded as any other.
    """
    prefix, _, name = slot.rpartition(".")
    is_value = prefix.endswith(_OLD_INNER) and f"{prefix}.codes" not in shapes  # of a user's own name
    if is_value or name in _TABLES or not isinstance(param, DTensor):
        return None
    others = [each for each in shapes if each.startswith(f"{prefix}.") and each[len(prefix) + 1 :] not in _TABLES]
    # all ranks ask alike: for their blocks, or for all where any block is cut
    elements = get_element_range(param)
    if elements is None or any(_cuts_blocks(param, math.prod(shapes[each])) for each in others):
        return torch.empty(shapes[slot], dtype=dtype, device=param.device)
    if len(shapes[slot]) != 1 or shapes[slot] == tuple(param.shape):
        return None
    size = shapes[slot][0]
    start, stop = (index * size // param.numel() for index in (elements.start, elements.stop))
    blocks = torch.empty(stop - start, dtype=dtype, device=param.device)
    return InnerShard(blocks, size, start, get_replica_coordinates(param) or 0)


def _cuts_blocks(param: DTensor, size: int) -> bool:
    """Return whether the shards of a parameter, on any rank, cut one of so many blocks of its elements."""
    rows, width = param.shape[0], math.prod(param.shape[1:])
    count = math.prod(split.count for split in get_dtensor_splits("", param))
    return not param.numel() or -(-rows // count) * width * size % param.numel() != 0


def rebuild_wrapper(parts: Mapping[str, Any], form: Mapping[str, Any], param: torch.Tensor | None) -> Any:
    """Return the wrapper tensor of a dict that :func:`flatten_wrappers` has made.

    Args:
        parts: The dict, with what was loaded for the tensors inside: whole, or this rank's part.
        form: The same with placeholders, which have the shapes of whole ones.
        param: The parameter whose state it is. That of a DTensor's shape is a DTensor.

    Raises:
        CheckpointingException: its class is not imported: a checkpoint must not decide what is.
        ShardingError: this rank's part of the parameter cuts blocks, or is no part of their order.
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
    sizes = {name: math.prod(form[key][name][2]) for name in inner if name not in _TABLES}
    local = {name: get_local_tensor(tensor) for name, tensor in inner.items()}
    cut = {name for name, size in sizes.items() if local[name].numel() * param.numel() == size * part.numel()}
    if not cut:
        whole = cls.__tensor_unflatten__(local, parts["context"], torch.Size(shape), parts["stride"])
        return _make_like(param, _cut(dequantize(whole), param).view(part.shape))
    for name in sizes.keys() - cut:
        local[name] = _cut(local[name], param)
    places = {
        name: tensor.view(part.shape) if sizes.get(name) == param.numel() else tensor for name, tensor in local.items()
    }
    wrapper = cls.__tensor_unflatten__(
        places, _replace_shape(parts["context"], shape, part.shape), part.shape, part.stride()
    )
    return _make_like(param, wrapper)


def _cut(tensor: torch.Tensor, param: DTensor) -> torch.Tensor:
    """Return what belongs to a rank's part of a parameter, of a tensor that has an element for each of its blocks."""
    elements = get_element_range(param)
    places = [] if elements is None else [index * tensor.numel() for index in (elements.start, elements.stop)]
    if not places or any(index % param.numel() for index in places):
        raise ShardingError(
            f"optimizer state of {tensor.numel()} blocks cannot be cut as its parameter is, of shape "
            f"{tuple(param.shape)}, by {param.placements}: load it with a number of ranks that leaves blocks whole"
        )
    start, stop = (index // param.numel() for index in places)
    return tensor.reshape(-1)[start:stop].clone()


def _make_like(param: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _replace_shape(context: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    """Return a wrapper's context with another shape in the place of its own."""

    def replace(value: Any) -> Any:
        return type(value)(new) if type(value) in (tuple, torch.Size) and tuple(value) == tuple(old) else value

    if isinstance(context, dict):
        return {key: replace(value) for key, value in context.items()}
    return type(context)(map(replace, context)) if type(context) in (list, tuple) else context

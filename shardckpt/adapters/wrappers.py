"""Tensors with others inside (quantized ones): taken apart for a save, and put together after a load.

A plain tensor and the shards of a DTensor are stored in the same way. An inner tensor with the axes of the outer one is
stored as it is; any other is flattened, and each rank writes its blocks at their place. So a load may have another
number of ranks. Where its shards would cut blocks, torchao quantizes nothing, and the dequantized values are loaded.
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
    make_dtensor,
)
from shardckpt.errors import CheckpointingException, ShardingError, is_first_warning
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import dict_list_map_outplace
from shardckpt.tensors.inner import INNER, SHARED, find_inner_names, flatten_tensor, get_values, has_inner
from shardckpt.tensors.memory import ORDINARY
from shardckpt.tensors.torch_private import read_local_tensor
from shardckpt.tensors.wrappers import dequantize, kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.mapping.base import ReplicaId, Replicated

logger = logging.getLogger(__name__)

#: The key that marks a dict in the place of a wrapper tensor: the name of its class. It is stored.
CLASS = "shardckpt: a tensor of the class"
#: The key of all tensors inside in the checkpoints of 27 November 2026.
_OLD_INNER = "inner"
#: The tensors under the older keys that all elements share: torchao's tables from codes to values.
_OLD_SHARED = frozenset({"qmap"})


@dataclass(frozen=True)
class InnerShard:
    """A rank's blocks of a flattened tensor that is inside the shards of a DTensor.

    Attributes:
        tensor: The blocks.
        size: The number of elements on all ranks.
        offset: The number of elements before the blocks.
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
        return has_inner(value) and get_values(value) is value
    if type(read_local_tensor(value)) in ORDINARY:  # nearly all are so
        return False
    local = get_local_tensor(value)
    if not has_inner(local):
        return False
    if not _can_be_cut(value, local):
        what = kind(local), tuple(value.shape), str(value.placements)
        if is_first_warning(__name__, *what):
            logger.warning(
                "a tensor of the class %s, shape %s, placements %s, is stored dequantized, and a load quantizes anew "
                "or, for the state of a fresh optimizer, not at all: blocks can be stored where shards are rows, and "
                "of one size",
                *what,
            )
        return False
    return True


def _can_be_cut(dtensor: DTensor, local: torch.Tensor) -> bool:
    """Return whether each rank's blocks are parts of a whole: of equal shards, that are rows."""
    elements = get_element_range(dtensor)
    # where shards differ, some may be too small to be quantized
    is_even = elements is not None and dtensor.numel() and len(elements) == local.numel() and _is_even(dtensor)
    shared = find_inner_names(local).shared
    inner = (tensor for name, tensor in flatten_tensor(local)[0].items() if name not in shared)
    return bool(is_even) and all(
        type(tensor) in ORDINARY and (tensor.ndim == 1 or _has_axes(tensor, local)) for tensor in inner
    )


def _has_axes(inner: torch.Tensor, local: torch.Tensor) -> bool:
    """Return whether a tensor inside has the axes of another, with blocks of equal size along each, several of rows."""
    return (
        inner.ndim == local.ndim
        and all(size and not whole % size for size, whole in zip(inner.shape, local.shape, strict=True))
        and (inner.shape[0] > 1 or inner.shape == local.shape)  # a scale of all is not one of rows
    )


def _is_even(dtensor: DTensor) -> bool:
    return all(not dtensor.shape[split.dim] % split.count for split in get_dtensor_splits("", dtensor))


def flatten_wrappers(state: Any, *, shards: bool = True) -> Any:
    """Return a state with a dict for each wrapper tensor, which has the tensors inside."""

    def flatten(leaf: Any) -> Any:
        return _flatten(leaf) if is_wrapper(leaf) and (shards or not isinstance(leaf, DTensor)) else leaf

    return dict_list_map_outplace(flatten, state)


def _flatten(tensor: Any) -> dict[str, Any]:
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    inner, context = flatten_tensor(local)
    shared = {name: inner.pop(name) for name in find_inner_names(local).shared & inner.keys()}
    if isinstance(tensor, DTensor):
        inner = {name: _place(each, local, tensor) for name, each in inner.items()}
    return {
        CLASS: kind(local),
        "context": _replace_shape(context, tuple(local.shape), tuple(tensor.shape)),
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        # inside may be another
        INNER: flatten_wrappers(inner),
        SHARED: flatten_wrappers(shared),
    }


def _place(inner: torch.Tensor, local: torch.Tensor, dtensor: DTensor) -> DTensor | InnerShard:
    """Return a tensor inside a DTensor's local one as a part of the inner tensor of all ranks."""
    if not _has_axes(inner, local):
        elements = get_element_range(dtensor) or range(0)
        offset, size = (index * inner.numel() // local.numel() for index in (elements.start, dtensor.numel()))
        return InnerShard(inner, size, offset, get_replica_coordinates(dtensor) or 0)
    rows = inner.shape[0] * dtensor.shape[0] // local.shape[0]
    return make_dtensor(inner, dtensor.device_mesh, dtensor.placements, (rows, *inner.shape[1:]))


def is_inner(slot: str) -> bool:
    """Return whether the dotted path of a tensor says that it was inside another."""
    return slot.rpartition(".")[0].rpartition(".")[2] in (INNER, SHARED, _OLD_INNER)


def request_inner(
    slot: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, param: torch.Tensor
) -> torch.Tensor | InnerShard | None:
    """Return memory for a stored tensor that was inside another: for this rank's blocks, or for all.

    It is None where the tensor is to be loaded as any other. ``slot`` is the dotted path of the tensor in the state,
    for which :func:`is_inner` is True; ``shapes`` has the shapes of all stored tensors of the state.
    """
    path, _, name = slot.rpartition(".")
    others = {each[len(path) + 1 :]: shape for each, shape in shapes.items() if each.startswith(f"{path}.")}
    is_value = path.endswith(_OLD_INNER) and "codes" not in others  # of a user's own name
    if is_value or not isinstance(param, DTensor):
        return None
    whole = functools.partial(torch.empty, dtype=dtype, device=param.device)
    is_old = not any(each.startswith(f"{path.removesuffix(INNER)}{SHARED}.") for each in shapes)
    if path.endswith(SHARED) or (is_old and name in _OLD_SHARED):
        return whole(shapes[slot])
    blocks = [math.prod(shape) for each, shape in others.items() if not (is_old and each in _OLD_SHARED)]
    # all ranks ask for the same: for their blocks, or for all where any block is cut
    elements = get_element_range(param)
    if elements is None or any(_cuts_blocks(param, count) for count in blocks):
        return whole(shapes[slot])
    if len(shapes[slot]) != 1 or shapes[slot] == tuple(param.shape):
        return None
    size = shapes[slot][0]
    start, stop = (index * size // param.numel() for index in (elements.start, elements.stop))
    return InnerShard(whole(stop - start), size, start, get_replica_coordinates(param) or 0)


def _cuts_blocks(param: DTensor, size: int) -> bool:
    """Return whether the shards of a parameter, on any rank, cut one of so many blocks of its elements."""
    rows, width = param.shape[0], math.prod(param.shape[1:])
    count = math.prod(split.count for split in get_dtensor_splits("", param))
    return not param.numel() or -(-rows // count) * width * size % param.numel() != 0


def rebuild_wrapper(parts: Mapping[str, Any], form: Mapping[str, Any], param: torch.Tensor | None) -> Any:
    """Return the wrapper tensor of a dict that :func:`flatten_wrappers` has made.

    ``parts`` is the dict, with the loaded values of the tensors inside: whole, or this rank's part. ``form`` is the
    same with placeholders, which have the shapes of whole ones. ``param`` is the parameter of this state; state with a
    DTensor's shape becomes a DTensor. A class that is not imported is an error: a checkpoint must not decide about
    imports. It is a ShardingError if this rank's part of the parameter cuts blocks, or is no part of their order.
    """
    cls = _find_class(parts[CLASS])
    inner, shared = _split_parts(parts)
    shapes = {name: each[2] for name, each in _split_parts(form)[0].items()}
    context, shape, stride = parts["context"], torch.Size(parts["shape"]), parts["stride"]
    if not isinstance(param, DTensor) or param.shape != shape:
        return cls.__tensor_unflatten__({**inner, **shared}, context, shape, stride)
    part = get_local_tensor(param)
    local = {name: get_local_tensor(tensor) for name, tensor in inner.items()}
    cut = {
        name
        for name, of_all in shapes.items()
        if local[name].numel() * param.numel() == math.prod(of_all) * part.numel()
    }
    if not cut:
        whole = cls.__tensor_unflatten__({**local, **shared}, context, shape, stride)
        return _make_like(param, _cut(dequantize(whole), param).view(part.shape))
    for name, of_all in shapes.items():
        rows = local[name] if name in cut else _cut(local[name], param)
        local[name] = rows.view(part.shape if math.prod(of_all) == param.numel() else (-1, *of_all[1:]))
    context = _replace_shape(context, shape, part.shape)
    return _make_like(param, cls.__tensor_unflatten__({**local, **shared}, context, part.shape, part.stride()))


def _find_class(name: str) -> Any:
    """Return the class of wrapper tensors by its full name, if it is imported."""
    module, _, last = name.rpartition(".")
    cls = getattr(sys.modules.get(module), last, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_unflatten__")):
        raise CheckpointingException(
            f"the state has a tensor of the class {name}, which is not imported: import {module} before the load (a "
            "checkpoint cannot have it imported)"
        )
    return cls


def _split_parts(parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors that are parts in a dict of :func:`flatten_wrappers`, and the shared ones."""
    inner = parts[INNER if INNER in parts else _OLD_INNER]
    shared = parts.get(SHARED, {name: inner[name] for name in _OLD_SHARED & inner.keys()})
    return {name: each for name, each in inner.items() if name not in shared}, shared


def _cut(tensor: torch.Tensor, param: DTensor) -> torch.Tensor:
    """Return the elements for a rank's part of a parameter, of a tensor with an element for each of its blocks."""
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
    return make_dtensor(local, param.device_mesh, param.placements, param.shape, param.stride())


def _replace_shape(context: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    """Return a wrapper's context with another shape in the place of its own, at any depth."""
    if type(context) in (tuple, torch.Size) and tuple(context) == old:
        return type(context)(new)
    if isinstance(context, dict):
        return {key: _replace_shape(value, old, new) for key, value in context.items()}
    if type(context) in (list, tuple):
        return type(context)(_replace_shape(value, old, new) for value in context)
    return context

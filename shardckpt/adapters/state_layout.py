"""Allocate a state tensor with the layout of its parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy

from shardckpt.adapters.dtensor import get_dtensor_splits, make_dtensor
from shardckpt.errors import CorruptCheckpointError, ShapeMismatchError, ShardingError
from shardckpt.planning.placements import compute_local_shape
from shardckpt.tensors.torch_private import empty_sharded_tensor_like, is_sharded_tensor, move_placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.planning.boxes import Ints

#: The axis of the state for each axis of the parameter; axes that were dropped or reduced to 1 are absent.
_Axes: TypeAlias = dict[int, int]


def empty_state_tensor(
    key: str,
    shape: Ints,
    dtype: torch.dtype,
    slot: str,
    param: torch.Tensor,
    *,
    shard_factored: bool = False,
    param_shape: Ints | None = None,
) -> torch.Tensor:
    """Return uninitialized memory for stored state of a parameter; each rank allocates only its part.

    State of the parameter's shape gets the parameter's layout: a DTensor of the same mesh and placements, a
    ShardedTensor of the same shards (nested where the parameter's are), a plain tensor on the same device. A single
    number of another shape, and any ``step``, is a plain tensor on the CPU, as optimizers keep it.

    Other state of a DTensor that has sizes of it alone (rows and columns of Adafactor, scales of channels) is a DTensor
    replicated over the mesh, as ``new_zeros`` of another shape makes it. With ``shard_factored``, if its shape is the
    parameter's with axes dropped or reduced to 1, the axes that remain are sharded as the parameter's are; if the shape
    matches in two ways that differ in placements, it is replicated. All other state is a plain tensor of the global
    shape.

    ``slot`` is the name of the state, such as ``"exp_avg"``; ``param_shape`` the global shape of the parameter in the
    same checkpoint, if it is there. State of a parameter of another shape is a ShapeMismatchError; a parameter on the
    meta device, or with placements that cannot be stored, is a ShardingError.
    """
    # a lazy parameter gets the stored shape before its optimizer gets the state
    own = tuple(param_shape) if param_shape is not None and is_lazy(param) else tuple(param.size())
    if math.prod(shape) == 1 and (shape != own or slot == "step"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    if _device(param).type == "meta":
        raise ShardingError(f"{key!r}: its parameter is on the meta device: give it memory (to_empty) first")
    if shape != own and _has_param_shape(shape, own, param_shape):
        raise ShapeMismatchError(
            f"{key!r} has the shape {shape}, its parameter {own}: the optimizer would fail at its first step. "
            "Build the model as it was when it was saved; into another vocabulary, load(..., resize=[...]) or "
            "CheckpointConfig(resize=[...]) loads. If the parameter is this rank's part of a larger one "
            "(experts of expert parallelism), make it a DTensor of the global shape, or load it and its state by "
            "dist_checkpointing.load"
        )
    if isinstance(param, DTensor) and _is_made_from(param, shape):
        return _as_dtensor(key, shape, dtype, param, shard_factored=shard_factored)
    if is_sharded_tensor(param) and shape == own:
        return empty_sharded_tensor_like(param, dtype)  # type: ignore[no-any-return]
    return torch.empty(shape, dtype=dtype, device=_device(param))


def resize_like(key: str, shape: Ints, old: Ints, new: Ints) -> Ints:
    """Return the shape of state whose parameter had another shape (``old``) when it was saved than now (``new``).

    State that has the old size of an axis that grows, and not at that axis, is a ShapeMismatchError: it is factored, or
    of another form of its own (a square preconditioner).
    """
    grown = {narrow for narrow, wide in zip(old, new, strict=False) if narrow != wide}
    is_aligned = len(shape) == len(old) == len(new)
    elsewhere = [size for size, narrow in zip(shape, old, strict=True) if size != narrow] if is_aligned else shape
    if grown.intersection(elsewhere):
        raise ShapeMismatchError(
            f"resize: {key!r} has the shape {shape} for a parameter of {old}, which does not show the axis that grows: "
            "load without the optimizer"
        )
    if not is_aligned:
        return shape
    return tuple(wide if size == narrow else size for size, narrow, wide in zip(shape, old, new, strict=True))


def _has_param_shape(shape: Ints, own: Ints, param_shape: Ints | None) -> bool:
    """Return whether state that lacks its parameter's shape had it when it was saved, and is not factored or the like.

    If the checkpoint does not have the parameter, this is so for state of as many axes, two or more, that is neither
    the parameter's with axes reduced to 1 nor a square (a preconditioner of one axis).
    """
    if param_shape is not None:
        return tuple(shape) == tuple(param_shape)
    is_square = len(set(shape)) == 1 and shape[0] in own
    return len(shape) == len(own) > 1 and not match_axes(shape, own) and not is_square


def _is_made_from(param: DTensor, shape: Ints) -> bool:
    """Return whether state has sizes of its parameter alone; a rank outside the mesh may not know these."""
    return param.device_mesh.get_coordinate() is None or {*shape} <= {*param.shape, 1}


def match_axes(shape: Ints, own: Ints) -> list[_Axes]:
    """Return every way to get a state's shape from its parameter's by dropping axes, or reducing them to 1."""
    found = []
    for chosen in combinations(range(len(own)), len(shape)):
        pairs = list(zip(chosen, shape, strict=True))
        if all(size in (own[axis], 1) for axis, size in pairs):
            found.append({axis: index for index, (axis, size) in enumerate(pairs) if size == own[axis]})
    return found


def _as_dtensor(key: str, shape: Ints, dtype: torch.dtype, param: DTensor, *, shard_factored: bool) -> DTensor:
    """Allocate state of a DTensor; see :func:`empty_state_tensor`. A rank outside the mesh allocates nothing."""
    if param.device_mesh.get_coordinate() is not None:
        get_dtensor_splits(key, param)  # before the shapes are compared: placements that cannot be stored raise
    if shape == tuple(param.shape):
        like = param.detach()
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)  # type: ignore[return-value]
    matches = match_axes(shape, tuple(param.shape)) if shard_factored else []
    # replicated if the matches differ in placements
    is_clear = len({_move_placements(param.placements, match) for match in matches}) == 1
    return _empty_moved(key, shape, dtype, param, matches[0] if is_clear else {})


def empty_of_axes(key: str, shape: Ints, dtype: torch.dtype, param: DTensor, axes: Iterable[int]) -> DTensor:
    """Return uninitialized memory for state of a DTensor: the mesh dimensions that shard the parameter shard its axis.

    ``axes`` has that axis; empty, the state is replicated.
    """
    if any(axis >= len(shape) for axis in axes):
        raise CorruptCheckpointError(f"{key!r} has the shape {shape}, and is said to be sharded along {axes}")
    sharded = {getattr(place, "dim", -1) for place in param.placements} - {-1}
    return _empty_moved(key, shape, dtype, param, {dim: axis for dim in sharded for axis in axes})


def _empty_moved(key: str, shape: Ints, dtype: torch.dtype, param: DTensor, axes: Mapping[int, int]) -> DTensor:
    """Allocate state that is sharded in ``axes`` like the parameter; none outside the mesh."""
    is_member = param.device_mesh.get_coordinate() is not None
    splits = get_dtensor_splits(key, param) if is_member else []
    kept = [replace(split, dim=axes[split.dim]) for split in splits if split.dim in axes]
    local = compute_local_shape(shape, kept) if is_member else (0,)
    memory = torch.empty(local, dtype=dtype, device=param.device)
    return make_dtensor(memory, param.device_mesh, _move_placements(param.placements, axes), shape)


def _move_placements(placements: Iterable[Any], axes: Mapping[int, int]) -> tuple[Any, ...]:
    """Return the placements with their axes renamed; mesh dimensions that shard another axis replicate."""
    dims = ((placement, axes.get(getattr(placement, "dim", -1))) for placement in placements)
    return tuple(Replicate() if dim is None else move_placement(placement, dim) for placement, dim in dims)


def _device(param: Any) -> torch.device:
    """Return the device of a parameter: of a ShardedTensor, its first local shard's, or the CPU without one."""
    if not is_sharded_tensor(param):
        return param.device  # type: ignore[no-any-return]
    return next((_device(shard.tensor) for shard in param.local_shards()), torch.device("cpu"))

"""Allocate a state tensor with the layout of its parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from operator import ne
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardckpt.adapters import get_dtensor_splits
from shardckpt.errors import ShardingError
from shardckpt.planning import compute_local_shape
from shardckpt.tensors import empty_sharded_tensor_like, is_sharded_tensor, move_placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.mapping import ShardedTensor
    from shardckpt.planning import Ints

#: The axis of the state for each axis of the parameter; axes that were dropped or reduced to 1 are absent.
_Axes: TypeAlias = dict[int, int]


def empty_state_tensor(
    stored: ShardedTensor, slot: str, param: torch.Tensor, *, shard_factored: bool = False
) -> torch.Tensor:
    """Allocate an uninitialized tensor for stored state of a parameter; each rank allocates only its part.

    State of the parameter's shape gets the parameter's layout: a DTensor of the same mesh and placements, a
    ShardedTensor of the same shards (nested where the parameter's are), a plain tensor on the same device. A single
    number of another shape, and any ``step``, is a plain tensor on the CPU, as optimizers keep it.

    Other state of a DTensor (rows and columns of Adafactor, scales of channels) is a DTensor replicated over the mesh,
    as ``new_zeros`` of another shape makes it. With ``shard_factored``, if its shape is the parameter's with axes
    dropped or reduced to 1, the axes that remain are sharded as the parameter's are; if the shape matches in two ways
    that differ in placements, it is replicated. Other state of other tensors is a plain tensor of the global shape.

    Args:
        stored: The stored state, without data: its global shape and dtype.
        slot: The name of the state, such as ``"exp_avg"``.
        param: The parameter.
        shard_factored: Whether factored state is sharded; see above.

    Returns:
        The tensor, of the stored dtype.

    Raises:
        ShardingError: the parameter is on the meta device, has placements that cannot be stored, or seems to be this
            rank's part of a larger parameter.
    """
    shape, own = tuple(stored.global_shape), tuple(param.size())
    if math.prod(shape) == 1 and (shape != own or slot == "step"):
        return torch.empty(shape, dtype=stored.dtype, device="cpu")
    if _device(param).type == "meta":
        raise ShardingError(f"{stored.key!r}: its parameter is on the meta device: give it memory (to_empty) first")
    if isinstance(param, DTensor):
        return _as_dtensor(stored, shape, param, shard_factored=shard_factored)
    if is_sharded_tensor(param) and shape == own:
        return empty_sharded_tensor_like(param, stored.dtype)  # type: ignore[no-any-return]
    if len(shape) == len(own) > 2 and sum(map(ne, shape, own)) == 1 and not match_axes(shape, own):  # noqa: PLR2004
        raise ShardingError(
            f"{stored.key!r} has the shape {shape}, its parameter {own}: if the parameter is this rank's part of a "
            "larger one (experts of expert parallelism), make it a DTensor of the global shape, or load it and its "
            "state by dist_checkpointing.load"
        )
    return torch.empty(shape, dtype=stored.dtype, device=_device(param))


def match_axes(shape: Ints, own: Ints) -> list[_Axes]:
    """Return every way to get a shape from a parameter's by dropping axes, or reducing them to 1.

    Args:
        shape: Shape of the state.
        own: Shape of the parameter.
    """
    found = []
    for chosen in combinations(range(len(own)), len(shape)):
        pairs = list(zip(chosen, shape, strict=True))
        if all(size in (own[axis], 1) for axis, size in pairs):
            found.append({axis: index for index, (axis, size) in enumerate(pairs) if size == own[axis]})
    return found


def _as_dtensor(stored: ShardedTensor, shape: Ints, param: DTensor, *, shard_factored: bool) -> DTensor:
    is_member = param.device_mesh.get_coordinate() is not None
    splits = get_dtensor_splits(stored.key, param) if is_member else []
    if shape == tuple(param.shape):
        like = param.detach()
        return torch.empty_like(like, dtype=stored.dtype, memory_format=torch.contiguous_format)  # type: ignore[return-value]
    axes = _unambiguous_axes(match_axes(shape, tuple(param.shape)) if shard_factored else [], param.placements)
    kept = [replace(split, dim=axes[split.dim]) for split in splits if split.dim in axes]
    local = compute_local_shape(shape, kept) if is_member else (0,)
    return DTensor.from_local(
        torch.empty(local, dtype=stored.dtype, device=param.device),
        param.device_mesh,
        _move_placements(param.placements, axes),
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def _unambiguous_axes(matches: list[_Axes], placements: Iterable[Any]) -> _Axes:
    """Return the axes of the first match if all matches give the same placements; else none."""
    kept = tuple(placements)
    results = {_move_placements(kept, axes) for axes in matches}
    return matches[0] if len(results) == 1 else {}


def _move_placements(placements: Iterable[Any], axes: Mapping[int, int]) -> tuple[Any, ...]:
    """Return the placements with their axes renamed; mesh dimensions that shard another axis replicate."""
    dims = ((placement, axes.get(getattr(placement, "dim", -1))) for placement in placements)
    return tuple(Replicate() if dim is None else move_placement(placement, dim) for placement, dim in dims)


def _device(param: Any) -> torch.device:
    """Return the device of a parameter: of a ShardedTensor, its first local shard's, or the CPU without one."""
    if not is_sharded_tensor(param):
        return param.device  # type: ignore[no-any-return]
    return next((_device(shard.tensor) for shard in param.local_shards()), torch.device("cpu"))


__all__ = ["empty_state_tensor", "match_axes"]

"""Memory for a state tensor, laid out over the ranks as its parameter is."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from operator import ne
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardckpt.adapters import splits_of
from shardckpt.errors import ShardingError
from shardckpt.planning import compute_local_shape
from shardckpt.tensors import empty_sharded_tensor_like, is_sharded_tensor, sharded_along

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.mapping import ShardedTensor
    from shardckpt.planning import Ints

#: Which axis of the state an axis of the parameter is; one that was reduced away is not in it.
_Axes: TypeAlias = dict[int, int]


def laid_out(stored: ShardedTensor, slot: str, param: torch.Tensor, *, shard_factored: bool = False) -> torch.Tensor:
    """An uninitialised tensor for stored state of a parameter; no rank gets more memory than its part takes.

    State of the parameter's shape lies as the parameter does: a DTensor of the same mesh and placements, a
    ShardedTensor of the same shards (one inside another where the parameter has that), a plain tensor on the same
    device. A single number that is not of that shape, or is a ``step``, is plain, on the CPU, as optimizers keep it.

    Other state of a DTensor (rows and columns of Adafactor, scales of channels) is a DTensor replicated over the mesh,
    as torch makes it: ``new_zeros`` of another shape is. With ``shard_factored``, where its shape is the parameter's
    with axes dropped or reduced to 1, the axes that remain are sharded as the parameter's are; what two such readings
    of the shape place differently is replicated all the same. Other state of other tensors is plain and whole.

    Args:
        stored: What is stored, without data.
        slot: The name of the state.
        param: The parameter.
        shard_factored: See above.

    Raises:
        ShardingError: the parameter has no memory, or placements that cannot be stored, or is a part of the whole.
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
    if len(shape) == len(own) > 2 and sum(map(ne, shape, own)) == 1 and not readings(shape, own):  # noqa: PLR2004
        raise ShardingError(
            f"{stored.key!r} has the shape {shape}, its parameter {own}: if that is this rank's part of it (experts of "
            "expert parallelism), the parameter must be a DTensor that says so, or be loaded with its state by "
            "dist_checkpointing.load"
        )
    return torch.empty(shape, dtype=stored.dtype, device=_device(param))


def readings(shape: Ints, own: Ints) -> list[_Axes]:
    """Every way in which a shape is a parameter's with some axes dropped, or reduced to 1."""
    found = []
    for chosen in combinations(range(len(own)), len(shape)):
        pairs = list(zip(chosen, shape, strict=True))
        if all(size in (own[axis], 1) for axis, size in pairs):
            found.append({axis: place for place, (axis, size) in enumerate(pairs) if size == own[axis]})
    return found


def _as_dtensor(stored: ShardedTensor, shape: Ints, param: DTensor, *, shard_factored: bool) -> DTensor:
    is_member = param.device_mesh.get_coordinate() is not None
    splits = splits_of(stored.key, param) if is_member else []
    if shape == tuple(param.shape):
        like = param.detach()
        return torch.empty_like(like, dtype=stored.dtype, memory_format=torch.contiguous_format)  # type: ignore[return-value]
    axes = _agreed(readings(shape, tuple(param.shape)) if shard_factored else [], param.placements)
    kept = [replace(split, dim=axes[split.dim]) for split in splits if split.dim in axes]
    local = compute_local_shape(shape, kept) if is_member else (0,)
    return DTensor.from_local(
        torch.empty(local, dtype=stored.dtype, device=param.device),
        param.device_mesh,
        _moved(param.placements, axes),
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def _agreed(ways: list[_Axes], placements: Iterable[Any]) -> _Axes:
    """The axes by any of the readings, if all of them mean the same placements; else none remains."""
    kept = tuple(placements)
    means = {_moved(kept, axes) for axes in ways}
    return ways[0] if len(means) == 1 else {}


def _moved(placements: Iterable[Any], axes: Mapping[int, int]) -> tuple[Any, ...]:
    """The placements of the axes that remain; those of the others replicate."""
    dims = ((placement, axes.get(getattr(placement, "dim", -1))) for placement in placements)
    return tuple(Replicate() if dim is None else sharded_along(placement, dim) for placement, dim in dims)


def _device(param: Any) -> torch.device:
    """Where a parameter is: of a ShardedTensor, its first local shard; the CPU if there is none."""
    if not is_sharded_tensor(param):
        return param.device  # type: ignore[no-any-return]
    return next((_device(shard.tensor) for shard in param.local_shards()), torch.device("cpu"))


__all__ = ["laid_out", "readings"]

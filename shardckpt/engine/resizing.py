"""Tensors whose size differs from the stored size: a vocabulary that has grown since the save."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.engine.optimizer_keys import is_moment_key
from shardckpt.engine.patterns import matches_any
from shardckpt.errors import CheckpointingException, listed
from shardckpt.mapping.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from shardckpt.mapping.base import ShardedBase
    from shardckpt.planning.boxes import Ints

logger = logging.getLogger(__name__)

#: The dtypes of less than a byte, an element a byte, that this torch has.
_FEW_BITS = frozenset(getattr(torch, f"{kind}{bits}", None) for kind in ("int", "uint") for bits in range(1, 8))


class _Kept(NamedTuple):
    """New rows of a shard: the number of the shard, an axis, where they begin on it, and the values that they have."""

    number: int
    axis: int
    first: int
    values: torch.Tensor


def allow_resizing(
    shards: Sequence[ShardedBase], stored: Mapping[str, Ints], patterns: Sequence[str]
) -> list[ShardedBase]:
    """Return the shards; tensors whose key matches a pattern may have another shape than is stored.

    If the stored shape is not known, each of them may, except flattened shards and those with prepended axes. Where it
    is known, such a shard of another shape is a CheckpointingException.
    """
    if not patterns:
        return list(shards)
    return [
        _allow(shard, stored) if isinstance(shard, ShardedTensor) and matches_any(shard.key, patterns) else shard
        for shard in shards
    ]


def _allow(shard: ShardedTensor, stored: Mapping[str, Ints]) -> ShardedTensor:
    shape = stored.get(shard.key)
    is_fixed = bool(shard.prepend_axis_num) or shard.flattened_range is not None
    if shape == tuple(shard.global_shape) or (shape is None and is_fixed):
        return shard
    if is_fixed:
        how = "flattened" if shard.flattened_range is not None else "stored with other axes than its tensor has"
        raise CheckpointingException(f"resize: {shard.key!r} has another shape than is stored, and is {how}")
    allowed = copy.copy(shard)
    allowed.allow_shape_mismatch = True
    return allowed


class Resizing:
    """The values of new rows, which a load into tensors of other sizes must keep.

    New rows of an optimizer's moments become zero, as a load with ``allow_shape_mismatch`` leaves them; those of its
    own weights stay, as those of the model's do. The main rank warns of rows that are not read.
    """

    def __init__(
        self, shards: Sequence[ShardedBase], stored: Mapping[str, Ints], patterns: Sequence[str], *, is_main: bool
    ) -> None:
        self._kept: list[_Kept] = []
        cut = []
        for number, shard in enumerate(shards if patterns else ()):
            if not isinstance(shard, ShardedTensor) or not matches_any(shard.key, patterns):
                continue
            old_shape = stored[shard.key]
            if any(old > new for old, new in zip(old_shape, shard.global_shape, strict=False)):
                cut.append(shard.key)
            if shard.data is None or is_moment_key(shard.key) or old_shape == tuple(shard.global_shape):
                continue
            for axis, (size, old, offset) in enumerate(
                zip(shard.data.shape, old_shape, shard.global_offset, strict=True)
            ):
                first = min(max(old - offset, 0), size)
                if first < size:
                    new_rows = _view_copyable(shard.data).narrow(axis, first, size - first).clone()
                    self._kept.append(_Kept(number, axis, first, new_rows))
        if cut and is_main:
            logger.warning("resize: stored rows beyond the wanted shape are not loaded: %s", listed(sorted(set(cut))))

    def restore(self, values: list[Any]) -> None:
        """Put the former values of new rows back into the loaded values."""
        for number, axis, first, kept in self._kept:
            _view_copyable(values[number]).narrow(axis, first, kept.shape[axis]).copy_(kept)


def _view_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph; of dtypes of a few bits (``uint4``), which torch does not copy, its bytes."""
    return tensor.detach().view(torch.uint8) if tensor.dtype in _FEW_BITS else tensor.detach()

"""Tensors that have other sizes than those that are stored: a vocabulary that has grown since the save."""

from __future__ import annotations

import copy
import logging
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine.optimizer_keys import is_optimizer_key
from shardckpt.errors import CheckpointingException, KeyMismatchError, listed, name_known
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    import torch

    from shardckpt.mapping import ShardedBase
    from shardckpt.planning import Ints

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    """What a shard of a tensor that has grown had before a load, and where its stored part ends, axis by axis."""

    number: int
    values: torch.Tensor
    ends: Ints


def parse_resize(resize: Collection[str]) -> tuple[str, ...]:
    """Return the patterns of a caller's ``resize``; raise CheckpointingException if it is one text."""
    if isinstance(resize, str):
        raise CheckpointingException(f"resize={resize!r}: give a list of patterns of keys, such as [{resize!r}]")
    return tuple(resize)


def check_patterns(patterns: Sequence[str], stored: Sequence[str]) -> None:
    """Raise KeyMismatchError if a pattern matches no stored key."""
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in stored):
            raise KeyMismatchError(
                f"resize: the pattern {pattern!r} matches no stored tensor {name_known(pattern, stored, 'keys')}"
            )


def allow_resizing(shards: Sequence[ShardedBase], patterns: Sequence[str]) -> list[ShardedBase]:
    """Return shards of which those that match a pattern may have another shape than is stored.

    Raises:
        CheckpointingException: one of them has axes that its tensor has not.
    """
    return [
        _allow(shard) if isinstance(shard, ShardedTensor) and is_resized(shard.key, patterns) else shard
        for shard in shards
    ]


def is_resized(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a key matches a pattern."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _allow(shard: ShardedTensor) -> ShardedTensor:
    if shard.prepend_axis_num:
        raise CheckpointingException(f"resize: {shard.key!r} is stored with other axes than its tensor has")
    allowed = copy.copy(shard)
    allowed.allow_shape_mismatch = True
    return allowed


class Resizing:
    """What a load into tensors of other sizes must keep: the values that new rows have.

    New rows of an optimizer's state become zero, as a load with ``allow_shape_mismatch`` leaves them.

    Args:
        shards: Those of the load, as :func:`allow_resizing` returned them.
        stored: The stored shapes by key.
        patterns: The caller's.
        is_main: Whether this rank warns of rows that are not read.
    """

    def __init__(
        self, shards: Sequence[ShardedBase], stored: Mapping[str, Ints], patterns: Sequence[str], *, is_main: bool
    ) -> None:
        self._kept: list[_Kept] = []
        cut = []
        for number, shard in enumerate(shards if patterns else ()):
            if not isinstance(shard, ShardedTensor) or not is_resized(shard.key, patterns):
                continue
            pairs = list(zip(stored[shard.key], shard.global_shape, strict=False))
            if any(old > new for old, new in pairs):
                cut.append(shard.key)
            if any(old < new for old, new in pairs) and shard.data is not None and not is_optimizer_key(shard.key):
                pairs_at = zip(stored[shard.key], shard.global_offset, strict=True)
                ends = tuple(max(old - offset, 0) for old, offset in pairs_at)
                self._kept.append(_Kept(number, shard.data.detach().clone(), ends))
        if cut and is_main:
            logger.warning("resize: stored rows beyond the wanted shape are not loaded: %s", listed(sorted(set(cut))))

    def restore(self, values: list[Any]) -> None:
        """Put back what new rows had, into the loaded values."""
        for number, kept, ends in self._kept:
            value = values[number].detach()
            for axis, (size, end) in enumerate(zip(kept.shape, ends, strict=True)):
                first = min(end, size)
                value.narrow(axis, first, size - first).copy_(kept.narrow(axis, first, size - first))

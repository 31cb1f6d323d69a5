"""Patterns of keys and names, as of :mod:`fnmatch`, by which a caller chooses tensors."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, name_known

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.distributed.comm import Comm


def matches_any(name: str, patterns: Collection[str]) -> bool:
    """Return whether a key or name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_below(key: str, names: Collection[str]) -> bool:
    """Return whether a key is one of some names, or a path in one."""
    return key in names or any(key.startswith(f"{name}.") for name in names)


def check_patterns(argument: str, patterns: Collection[str], names: Collection[str], comm: Comm | None = None) -> None:
    """Raise CheckpointingException if a pattern of an argument matches none of the names; collective with ``comm``.

    With ``comm`` a pattern, the same on all ranks, may match a name of any rank alone: pipeline stages have their own.
    """
    matched = [any(fnmatchcase(name, pattern) for name in names) for pattern in patterns]
    if comm is not None and patterns:
        matched = [*map(bool, comm.largest(*matched))]
    for pattern, is_matched in zip(patterns, matched, strict=True):
        if not is_matched:
            raise CheckpointingException(
                f"{argument}: the pattern {pattern!r} matches no tensor {name_known(pattern, names, 'names')}"
            )

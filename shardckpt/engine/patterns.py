"""Patterns of keys and names, as of :mod:`fnmatch`, by which a caller chooses tensors."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, name_known

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardckpt.distributed.comm import Comm


def matches_any(name: str, patterns: Collection[str]) -> bool:
    """Return whether a key or name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_below(key: str, names: Collection[str]) -> bool:
    """Return whether a key is one of some names, or a path in one."""
    return key in names or any(key.startswith(f"{name}.") for name in names)


def check_patterns(argument: str, patterns: Collection[str], names: Collection[str]) -> None:
    """Raise CheckpointingException if a pattern of an argument matches none of the names."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CheckpointingException(
                f"{argument}: the pattern {pattern!r} matches no tensor {name_known(pattern, names, 'names')}"
            )


def find_unmatched(patterns: Sequence[str], names: Collection[str], comm: Comm) -> list[str]:
    """Collective: return the patterns, the same on all ranks, that match no name of any rank: stages have their own."""
    if not patterns:
        return []
    matched = comm.largest(*(any(fnmatchcase(name, pattern) for name in names) for pattern in patterns))
    return [pattern for pattern, is_matched in zip(patterns, matched, strict=True) if not is_matched]

"""What can be done where a checkpoint is: each path says it of itself, so that no code asks which store it has.

A directory of this machine can do all of it. A path of another kind has attributes of these functions' names, as
:class:`~shardckpt.storage.remote.RemotePath` has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.storage.remote import RemotePath


def can_rename(path: Path) -> bool:
    """Whether a directory gets another name there in one step; where not, a checkpoint is whole by its last object."""
    return bool(getattr(path, "can_rename", True))


def has_local_files(path: Path) -> bool:
    """Whether the system opens the files that are there; where not, they are read by requests for ranges."""
    return bool(getattr(path, "has_local_files", True))


def on_store(path: Path) -> RemotePath | None:
    """The path with what only a store's has (its folder, sizes, ranges); None where the files are local."""
    return None if has_local_files(path) else cast("RemotePath", path)


__all__ = ["can_rename", "has_local_files", "on_store"]

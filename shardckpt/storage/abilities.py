"""What the place of a checkpoint can do: each path answers for itself, so that no code tests for a class of store.

A directory of this machine can do everything. Another kind of path has attributes with the names of these functions, as
:class:`~shardckpt.storage.remote.RemotePath` has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.storage.remote import RemotePath


def can_rename(path: Path) -> bool:
    """Return whether a directory can be renamed there in one step; if not, a last object completes a checkpoint."""
    return bool(getattr(path, "can_rename", True))


def has_local_files(path: Path) -> bool:
    """Return whether the system can open the files there; if not, they are read by requests for ranges."""
    return bool(getattr(path, "has_local_files", True))


def on_store(path: Path) -> RemotePath | None:
    """Return the path as a RemotePath, which has a folder, sizes and ranges; None if the files are local."""
    return None if has_local_files(path) else cast("RemotePath", path)

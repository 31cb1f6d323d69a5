"""The bytes and the last write of a file or directory, with everything in it."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from shardckpt.storage.abilities import on_store

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

#: Errors of an entry that another process has removed meanwhile.
_GONE = (FileNotFoundError, NotADirectoryError)


def used_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory; several hard links to one file count once."""
    return sum(info.st_size for info, _ in _list_files(path))


def freed_bytes(path: Path) -> int:
    """Return the bytes that a removal would free: files without a hard link elsewhere."""
    return sum(info.st_size for info, links in _list_files(path) if links >= info.st_nlink)


def allocated_bytes(path: Path) -> int:
    """Return the disk space of a local file or directory with its content, as ``du`` counts it: hard links once.

    An OSError if a part of it cannot be read.
    """
    return sum({(info.st_dev, info.st_ino): info.st_blocks * 512 for info in _walk(path, ())}.values())


def find_last_write(path: Path) -> float | None:
    """Return when a file or directory was last written, moved or copied, in seconds since 1970.

    None if it is on a store that does not tell times, or cannot be read; 0.0 if it is gone.
    """
    if (remote := on_store(path)) is not None:
        return max(remote.times().values(), default=None)
    try:
        return read_last_write(path, count_renames=True)
    except OSError:
        return None


def read_last_write(path: Path, *, count_renames: bool) -> float:
    """Return when a local file or directory was last written, in seconds since 1970; 0.0 if it is gone.

    An OSError if a part of it cannot be read: the newest write may be there. A rename, or a copy that keeps times,
    leaves the time of the write (mtime) and sets the time of the change (ctime), which counts with ``count_renames``.
    """
    times = (max(info.st_mtime, info.st_ctime) if count_renames else info.st_mtime for info in _walk(path, _GONE))
    return max(times, default=0.0)


def _list_files(path: Path) -> list[tuple[os.stat_result, int]]:
    """Return the status of each file, once, and the number of hard links to it."""
    files: dict[tuple[int, int], list[os.stat_result]] = {}
    for info in _walk(path, OSError):
        if stat.S_ISREG(info.st_mode):
            files.setdefault((info.st_dev, info.st_ino), []).append(info)
    return [(links[0], len(links)) for links in files.values()]


def _walk(path: Path, skipped: type[OSError] | tuple[type[OSError], ...]) -> Iterator[os.stat_result]:
    """Yield the status of a file or directory and of everything in it, but entries that raise a ``skipped`` error."""
    try:
        yield (info := path.lstat())
        entries = list(path.iterdir()) if stat.S_ISDIR(info.st_mode) else []
    except skipped:
        return
    for entry in entries:
        yield from _walk(entry, skipped)

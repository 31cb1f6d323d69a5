"""Compare a staging directory with the records of its files: no file enters a checkpoint without a digest."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError, listed
from shardckpt.manifest import FileRecord
from shardckpt.storage.digest import SEGMENT_BYTES, Segments, digest_function
from shardckpt.storage.filesystem import close_file, naming, open_existing, read_into

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def digest_file(path: Path, algorithm: str, keys: int, rank: int, *, sha256: bool) -> tuple[FileRecord, str]:
    """Fsync a file that other code has written, and compute its digests.

    Args:
        path: The file.
        algorithm: Name of the digest algorithm.
        keys: How many stored items it has.
        rank: The rank that records it.
        sha256: Whether to compute its SHA-256, too.

    Returns:
        The file's record, and its SHA-256 in hex or ``""``.

    Raises:
        CheckpointingException: it is not a regular file, or it changes while it is read.
    """
    digest, sha = digest_function(algorithm), hashlib.sha256()
    fd, size = open_existing(path)
    try:
        with naming("fsync", path):
            os.fsync(fd)
        lengths, digests = [], []
        memory = memoryview(bytearray(min(size, SEGMENT_BYTES)))
        for start in range(0, size, SEGMENT_BYTES):
            part = memory[: min(SEGMENT_BYTES, size - start)]
            read_into(fd, path, part, start)
            lengths.append(part.nbytes)
            digests.append(digest(part))
            if sha256:
                sha.update(part)
    finally:
        close_file(fd)
    table = Segments(lengths, digests, algorithm)
    record = FileRecord(name=path.name, size=size, rank=rank, keys=keys, digest=table.root(), segments=table.pack())
    check_as_recorded(path.parent, [record])
    return record, sha.hexdigest() if sha256 else ""


def check_as_recorded(directory: Path, files: Iterable[FileRecord]) -> None:
    """Raise an error if a file is gone, is not a regular file, or has another size than its record.

    Every rank checks its own files: on a network file system the client that wrote a file sees its true state.

    Raises:
        StorageError: names the files.
    """
    changed = [fault for file in files if (fault := _change(directory, file))]
    if changed:
        raise StorageError(
            f"{directory}: files were changed after they were recorded with their digests: {listed(changed)}; write a "
            "file completely, then call writer.finish or writer.adopt"
        )


def refuse_unrecorded(directory: Path, recorded: Collection[str]) -> None:
    """Raise an error for every file in the directory without a record.

    On a network file system the listing may be stale; the caller has just created a file there, which refreshes it.

    Args:
        directory: A staging directory.
        recorded: Names of the files that have a record with digests.

    Raises:
        StorageError: names the files without a record.
    """
    with naming("list", directory), os.scandir(directory) as entries:
        found = sorted(_shown(entry) for entry in entries if entry.name not in recorded)
    if found:
        raise StorageError(
            f"{directory}: what was written there past the checkpoint's writer has no digests: {listed(found)}; write "
            "files by context.writer.create or write, or hand each that something else has written over by "
            "context.writer.adopt(name): regular files in the directory itself, all others must be gone after save"
        )


def _shown(entry: os.DirEntry[str]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    return repr(entry.name) if stat.S_ISREG(mode) else f"{entry.name!r} ({_kind(mode)})"


def _kind(mode: int) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")


def _change(directory: Path, file: FileRecord) -> str:
    try:
        found = (directory / file.name).lstat()
    except FileNotFoundError:
        return f"{file.name!r} is gone"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.name!r} is now {_kind(found.st_mode)}"
    return "" if found.st_size == file.size else f"{file.name!r} had {file.size} bytes, and has {found.st_size}"


__all__ = ["check_as_recorded", "digest_file", "refuse_unrecorded"]

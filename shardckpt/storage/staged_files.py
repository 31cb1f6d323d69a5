"""What lies in a staging directory, against what is recorded: nothing comes into a checkpoint by being there."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError, listed
from shardckpt.manifest import FileRecord
from shardckpt.storage.digest import SEGMENT_BYTES, Segments, digest_function
from shardckpt.storage.filesystem import close_file, naming, open_existing, read_into, sync_file

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
    """Read a file that something else has written, and make it durable.

    Args:
        path: The file.
        algorithm: Of the digests.
        keys: How many stored items it has.
        rank: Who records it.
        sha256: Whether its SHA-256 is wanted, too.

    Returns:
        Its record, and its SHA-256 in hex or ``""``.

    Raises:
        CheckpointingException: it is not a regular file, or it changes while it is read.
    """
    sync_file(path)
    digest, whole = digest_function(algorithm), hashlib.sha256()
    fd, size = open_existing(path)
    try:
        lengths, digests = [], []
        memory = memoryview(bytearray(min(size, SEGMENT_BYTES)))
        for start in range(0, size, SEGMENT_BYTES):
            part = memory[: min(SEGMENT_BYTES, size - start)]
            read_into(fd, path, part, start)
            lengths.append(part.nbytes)
            digests.append(digest(part))
            if sha256:
                whole.update(part)
    finally:
        close_file(fd)
    table = Segments(lengths, digests, algorithm)
    record = FileRecord(name=path.name, size=size, rank=rank, keys=keys, digest=table.root(), segments=table.pack())
    check_as_recorded(path.parent, [record])
    return record, whole.hexdigest() if sha256 else ""


def check_as_recorded(directory: Path, files: Iterable[FileRecord]) -> None:
    """Whether files are still as they were recorded, as far as the directory's entries tell.

    Every rank does it for its own files: what a client of a network file system has written it sees as it is.

    Raises:
        StorageError: names those that were removed, replaced, cut or appended to.
    """
    changed = [fault for file in files if (fault := _change(directory, file))]
    if changed:
        raise StorageError(
            f"{directory}: files were changed after they were recorded with their digests: {listed(changed)}; write a "
            "file completely, then call writer.finish or writer.adopt"
        )


def refuse_unrecorded(directory: Path, recorded: Collection[str]) -> None:
    """Raise for whatever lies in the directory without a record.

    On a network file system the caller has just made a file there: that renews what its client knows of the directory.

    Args:
        directory: A staging directory.
        recorded: Names of the files that are recorded with their digests.

    Raises:
        StorageError: names what is not.
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

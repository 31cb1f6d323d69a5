"""Compare a staging directory with the records of its files: no file enters a checkpoint without a digest."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import StorageError, listed
from shardckpt.manifest.models import FileRecord
from shardckpt.manifest.names import find_folders
from shardckpt.storage.digest import SEGMENT_BYTES, Segments, digest_function
from shardckpt.storage.filesystem import refuse_linked_folders, wrap_os_errors
from shardckpt.storage.input_file import open_existing

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

#: Names for errors of entries that are no regular files, by the first letter of ``stat.filemode``.
_KIND_NAMES = {
    "d": "a directory",
    "l": "a symbolic link",
    "p": "a FIFO",
    "s": "a socket",
    "c": "a device",
    "b": "a device",
}


class FilePart(NamedTuple):
    """The part of a file that one rank wrote: segments with their digests, in any order.

    Attributes:
        name: The file's path in the checkpoint.
        size: Bytes of the entire file.
        rank: The rank that wrote it.
        keys: The number of stored items that this part counts, for reports.
        starts: The offset of each segment in the file, uint64.
        lengths: The bytes of each segment, uint32.
        digests: The digest of each segment, uint32 or uint64.
    """

    name: str
    size: int
    rank: int
    keys: int
    starts: array[int]
    lengths: array[int]
    digests: array[int]


def digest_file(
    directory: Path, name: str, algorithm: str, keys: int, rank: int, *, sha256: bool
) -> tuple[FileRecord, str]:
    """Fsync a file that other code has written into a staging directory; return its record and SHA-256.

    The SHA-256 is in hex; ``""`` unless ``sha256`` asks for it. A size that changes during the read is an error; a
    change of bytes alone is not noticed.
    """
    make_digest, sha = digest_function(algorithm), hashlib.sha256()
    path = directory / name
    refuse_linked_folders(directory, name)
    lengths, digests = [], []
    with open_existing(path) as file:
        size = file.size
        with wrap_os_errors("fsync", path):
            os.fsync(file.fileno())
        memory = memoryview(bytearray(min(size, SEGMENT_BYTES)))
        for start in range(0, size, SEGMENT_BYTES):
            part = memory[: min(SEGMENT_BYTES, size - start)]
            file.read_into(part, start)
            lengths.append(part.nbytes)
            digests.append(make_digest(part))
            if sha256:
                sha.update(part)
    record = make_record(name, size, rank, keys, Segments(lengths, digests, algorithm))
    check_as_recorded(directory, [record])  # it may have grown while it was read
    return record, sha.hexdigest() if sha256 else ""


def make_record(name: str, size: int, rank: int, keys: int, table: Segments) -> FileRecord:
    """Return the record of a file that has ``keys`` stored items."""
    return FileRecord(name=name, size=size, rank=rank, keys=keys, digest=table.root(), segments=table.pack())


def check_as_recorded(directory: Path, files: Iterable[FileRecord | FilePart]) -> None:
    """Raise StorageError if a file is gone, is not a regular file, or has another size than its record.

    Every rank checks its own files: on a network file system the client that wrote a file sees its true state.
    """
    changed = [change for file in files if (change := _describe_change(directory, file))]
    if changed:
        raise StorageError(
            f"{directory}: files were changed after they were recorded with their digests: {listed(changed)}; write a "
            "file completely, then call writer.finish or writer.adopt"
        )


def refuse_unrecorded(directory: Path, recorded: Collection[str]) -> None:
    """Raise StorageError if the directory has files without a record, or folders without a recorded file."""
    with wrap_os_errors("list", directory):
        found = sorted(_find_unrecorded(directory, "", recorded, find_folders(recorded)))
    if found:
        raise StorageError(
            f"{directory}: entries that did not come from the checkpoint's writer have no digests: {listed(found)}; "
            "write files with context.writer.create or write, or register a regular file that other code wrote with "
            "context.writer.adopt(name); save must remove everything else, empty folders included"
        )


def _find_unrecorded(
    directory: Path, within: str, recorded: Collection[str], folders: Collection[str]
) -> Iterator[str]:
    """Yield the entries of a folder without a record, as errors show them; ``within`` is ``""`` or ends with ``/``."""
    with os.scandir(directory / within) as entries:
        for entry in entries:
            name, mode = within + entry.name, entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode) and name in folders:
                yield from _find_unrecorded(directory, f"{name}/", recorded, folders)
            elif name not in recorded:
                yield repr(name) if stat.S_ISREG(mode) else f"{name!r} ({_name_kind(mode)})"


def _name_kind(mode: int) -> str:
    return _KIND_NAMES.get(stat.filemode(mode)[0], "not a regular file")


def _describe_change(directory: Path, file: FileRecord | FilePart) -> str:
    """Return how a file differs from its record; ``""`` if it does not."""
    path = directory / file.name
    with wrap_os_errors("access", path):
        try:
            found = path.lstat()
        except FileNotFoundError:
            return f"{file.name!r} is gone"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.name!r} is now {_name_kind(found.st_mode)}"
    return "" if found.st_size == file.size else f"{file.name!r} had {file.size} bytes, and has {found.st_size}"

"""Read a file of a checkpoint without torch, which takes seconds to import: a command may only list the items."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.digest import digest_function
from shardckpt.storage.open_files import OpenFiles

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest.models import Record
    from shardckpt.manifest.plain import PlainRecord


def read_recorded_file(
    directory: Path, record: PlainRecord | Record, name: str, offset: int = 0, nbytes: int | None = None
) -> bytes:
    """Return the bytes of a file that a checkpoint's record names, checked as a load checks them.

    Args:
        directory: The checkpoint, on this machine, held open: all that is read is of one save.
        record: The content of its ``shardckpt.json``.
        name: The file.
        offset: Of the first byte.
        nbytes: How many bytes; None for all.

    Raises:
        CorruptCheckpointError: it is missing, ends before, or lacks the bytes that were written.
        CheckpointingException: the digests need a package that is not installed.
    """
    algorithm = record.digest_algorithm if settings.verify_reads() else None
    records = {file.name: file for file in record.files}
    file = OpenFiles(directory, records, algorithm, nullcontext).open_unshared(name)
    try:
        stop = file.size if nbytes is None else offset + nbytes
        if stop > file.size:
            raise CorruptCheckpointError(f"{file.path} of {file.size} bytes ends before byte {stop}")
        # a digest is of a whole segment
        segments = [] if file.segments is None else [*file.segments.touching(offset, stop)]
        low, high = (segments[0][0], segments[-1][1]) if segments else (offset, stop)
        data = bytearray(high - low)
        file.input.read_into(memoryview(data), low)
        digest = digest_function(record.digest_algorithm) if segments else None
        for start, end, expected in segments:
            if digest is not None and digest(memoryview(data)[start - low : end - low]) != expected:
                raise file.differs_error(start, end)
    finally:
        file.close()
    return bytes(memoryview(data)[offset - low : stop - low])

"""Read a file of a checkpoint without torch, which takes seconds to import: a command may only list what is stored."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.digest import digest_function
from shardckpt.storage.input_file import read_all
from shardckpt.storage.open_files import OpenFiles

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest.models import Record
    from shardckpt.manifest.plain import PlainRecord


def read_recorded_file(directory: Path, record: PlainRecord | Record, name: str) -> bytes:
    """Return the bytes of a file that a checkpoint's record names, checked as a load checks them.

    Args:
        directory: The checkpoint, on this machine, held open: all that is read is of one save.
        record: What its ``shardckpt.json`` says.
        name: The file.

    Raises:
        CorruptCheckpointError: it is missing, or has not the bytes that were written.
        CheckpointingException: the digests need a package that is not installed.
    """
    algorithm = record.digest_algorithm if settings.verify_reads() else None
    records = {file.name: file for file in record.files}
    file = OpenFiles(directory, records, algorithm, nullcontext).open_unshared(name)
    try:
        data = read_all(file.input)
        if algorithm is not None and file.segments is not None:
            digest = digest_function(algorithm)
            for start, stop, expected in file.segments.touching(0, file.size):
                if digest(memoryview(data)[start:stop]) != expected:
                    raise CorruptCheckpointError(
                        f"bytes {start} to {stop} of {file.path} are not those that were written (digest differs)"
                    )
    finally:
        file.close()
    return data

"""Choose how many files a rank writes, and which at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardckpt.storage.direct import count_parallel_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.storage.writer import CheckpointWriter

_FileT = TypeVar("_FileT")

#: Several files are faster than one only if each has at least this many bytes.
_MIN_FILE_BYTES = 32 << 20


def count_files(requested: int | None, nbytes: int, directory: Path | None) -> int:
    """Return the number of files that the caller requested, or that is fastest for so many bytes in a directory.

    ``requested`` is None where the number is to be chosen, the directory if nothing is written.
    """
    most = nbytes // _MIN_FILE_BYTES
    return requested or (1 if most <= 1 or directory is None else min(most, count_parallel_files(directory)))


def list_turns(files: Sequence[_FileT], writer: CheckpointWriter) -> list[Sequence[_FileT]]:
    """Return which files are written at a time: all, or one, where a kill keeps only those that are complete."""
    return [[file] for file in files] if writer.file_bytes else [files]

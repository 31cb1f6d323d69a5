"""Choose how many files a rank writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.storage.direct import count_parallel_files

if TYPE_CHECKING:
    from pathlib import Path

#: Several files are faster than one only if each has at least this many bytes.
_MIN_FILE_BYTES = 32 << 20


def count_files(requested: int | None, nbytes: int, directory: Path | None) -> int:
    """Return the number of files that the caller requested, or that is fastest for so many bytes in a directory.

    ``requested`` is None where the number is to be chosen, the directory if nothing is written.
    """
    most = nbytes // _MIN_FILE_BYTES
    return requested or (1 if most <= 1 or directory is None else min(most, count_parallel_files(directory)))

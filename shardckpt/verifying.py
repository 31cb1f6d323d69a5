"""Checking every byte of a checkpoint against the digests that were made while it was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.gate import hold_checkpoint
from shardckpt.integrity import expected_files, find_faults
from shardckpt.locations import locate
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME, RECORD_NAME
from shardckpt.plugins import host
from shardckpt.storage.directory import retry_if_replaced

if TYPE_CHECKING:
    import os
    from pathlib import Path


@dataclass(frozen=True)
class FileResult:
    """A file in a checkpoint's directory.

    Attributes:
        name: Its name in the directory.
        nbytes: Its size, as it was written where that is known; 0 for a foreign file.
        fault: What is wrong with it; ``""`` for nothing, and for a foreign file, which is not read.
        foreign: Whether it is not a file of the checkpoint.
    """

    name: str
    nbytes: int
    fault: str
    foreign: bool = False


def verify_checkpoint(directory: str | os.PathLike[str]) -> list[FileResult]:
    """Read and check every file, in parallel; files that are not the checkpoint's are listed as foreign, no fault.

    Raises:
        CheckpointingException: there is no checkpoint, or one without digests (neither ours nor ``integrity.json``).
    """
    return retry_if_replaced(lambda: _verified(locate(directory, host())), directory)


def _verified(directory: Path) -> list[FileResult]:
    path, manifest = hold_checkpoint(directory, host())
    files = expected_files(path, manifest)
    faults = find_faults(path, manifest, files)
    known = {MARKER_NAME, RECORD_NAME, INTEGRITY_NAME, *(file.name for file in files)}
    extra = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    return [
        *(FileResult(file.name, file.nbytes, fault) for file, fault in zip(files, faults, strict=True)),
        *(FileResult(name, 0, "", foreign=True) for name in extra),
    ]


__all__ = ["FileResult", "verify_checkpoint"]

"""Checking every byte of a checkpoint against the digests that were made while it was written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardckpt.errors import CheckpointingException
from shardckpt.gate import read_manifest
from shardckpt.manifest import MARKER_NAME, RECORD_NAME
from shardckpt.plugins import host
from shardckpt.storage.digest import SEGMENT_BYTES
from shardckpt.storage.reader import CheckpointReader


@dataclass(frozen=True)
class FileResult:
    """A file in a checkpoint's directory.

    Attributes:
        name: Its name in the directory.
        nbytes: The size that was written; 0 for a foreign file.
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
        CheckpointingException: there is no checkpoint, or one without digests (written by another library).
    """
    path = Path(os.path.realpath(directory))
    manifest = read_manifest(path, host())
    if manifest.record is None:
        raise CheckpointingException(f"{path} has no {RECORD_NAME}: another library wrote it, without digests")
    with CheckpointReader(path, manifest, verify=True) as reader:
        results = reader.map(
            lambda record: FileResult(record.name, record.size, _fault(reader, record.name, record.size)),
            manifest.record.files,
            size=lambda record: record.size,
        )
    known = {MARKER_NAME, RECORD_NAME, *(record.name for record in manifest.record.files)}
    extra = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    return results + [FileResult(name, 0, "", foreign=True) for name in extra]


def _fault(reader: CheckpointReader, name: str, size: int) -> str:
    try:
        reader.size(name)  # opens it: an empty file must be there too
        buffer = memoryview(bytearray(min(size, 4 * SEGMENT_BYTES)))
        for start in range(0, size, max(buffer.nbytes, 1)):
            reader.read_into(name, start, buffer[: size - start], name)
    except CheckpointingException as exc:
        return str(exc)
    return ""


__all__ = ["FileResult", "verify_checkpoint"]

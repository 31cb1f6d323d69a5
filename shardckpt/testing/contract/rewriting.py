"""Checkpoints as a vandal leaves them: other bytes under right digests, other versions; and a reader for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.manifest.models import Manifest, Marker, Record
from shardckpt.manifest.names import MARKER_NAME, RECORD_NAME
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.writer import CheckpointWriter

if TYPE_CHECKING:
    import os


def read_record(path: Path) -> Record:
    """Return the content of ``shardckpt.json``."""
    return Record.parse((path / RECORD_NAME).read_bytes())


def open_reader(path: Path, *, with_record: bool = True) -> CheckpointReader:
    """Open a checkpoint's files; without the record, as another library's, which have no digests."""
    record = read_record(path)
    manifest = Manifest(backend=record.backend, version=record.version, record=record if with_record else None)
    return CheckpointReader(path, manifest)


def reseal(path: str | os.PathLike[str]) -> None:
    """Make digests of a checkpoint's files as they are now, as someone does who changes a checkpoint on purpose.

    Example:
        A test that a hostile index is refused, in a format whose index is no text::

            index = path / "index.bin"
            index.write_bytes(encode_index([entry._replace(start=1 << 60)]))
            reseal(path)
            with pytest.raises(CorruptCheckpointError):
                dist_checkpointing.load(state, path, LoadMine())

    Args:
        path: The checkpoint's directory. Its record, ``shardckpt.json``, is rewritten; no file is added or removed.
    """
    path = Path(path)
    record = read_record(path)
    with CheckpointWriter(path, 0, algorithm=record.digest_algorithm) as writer:
        files = tuple(writer.adopt(file.name, file.keys) for file in record.files)
    (path / RECORD_NAME).write_bytes(record.model_copy(update={"files": files}).dump())


def rewrite_format(path: Path, backend: str, version: int) -> None:
    """Let a checkpoint say that it has another backend or version."""
    marker = Marker.parse((path / MARKER_NAME).read_bytes())
    changed = marker.model_copy(update={"sharded_backend": backend, "sharded_backend_version": version})
    (path / MARKER_NAME).write_text(changed.model_dump_json())
    record = read_record(path).model_copy(update={"backend": backend, "version": version})
    (path / RECORD_NAME).write_bytes(record.dump())

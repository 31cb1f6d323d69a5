"""The JSON files of a checkpoint, as pydantic models: these models are the specification.

``metadata.json`` has Megatron's four fields and says which strategy reads the rest. ``shardckpt.json`` is ours: which
release saved, which files belong to the checkpoint, and their digests. Both are written last, before the commit.
``integrity.json`` is Megatron's, since 0.18, and optional: the SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MARKER_NAME = "metadata.json"
RECORD_NAME = "shardckpt.json"
INTEGRITY_NAME = "integrity.json"
#: Largest size of each file that a reader accepts, in bytes.
MARKER_LIMIT = 1 << 20
RECORD_LIMIT = 1 << 31
INTEGRITY_LIMIT = 1 << 26

#: The algorithm of the digests in ``integrity.json``.
INTEGRITY_ALGORITHM = "sha256"

_NO_DIGEST = "0" * 64

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,255}$")]
_Count = Annotated[int, Field(ge=0)]


class Marker(BaseModel):
    """``metadata.json``: which strategy, by Megatron's names; other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


class FileRecord(BaseModel):
    """A file of the checkpoint: its size in bytes, its rank, its digests (:mod:`shardckpt.storage.digest`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    size: _Count
    rank: _Count
    keys: _Count
    digest: str
    segments: str


class Record(BaseModel):
    """``shardckpt.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1
    save_id: str
    backend: str
    version: int
    #: Oldest shardckpt (or plugin distribution) whose reader understands this version, for the gate's error.
    reader: str
    writer: dict[str, str]
    world_size: Annotated[int, Field(ge=1)]
    digest_algorithm: str
    files: tuple[FileRecord, ...]
    #: What was saved as ``content_metadata``, if it is plain JSON; it is in the common state too.
    content_metadata: Any = None
    #: SHA-256, in hex, of the file's bytes with zeros in the place of this digest.
    self_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = _NO_DIGEST

    def dump(self) -> bytes:
        """Return the bytes of ``shardckpt.json``, its own digest included."""
        text = self.model_copy(update={"self_digest": _NO_DIGEST}).model_dump_json(indent=1)
        head, _, tail = text.rpartition(
            _NO_DIGEST
        )  # the last field: the caller's metadata before it may have the same digits
        return (head + hashlib.sha256(text.encode()).hexdigest() + tail).encode()

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """Return the record in the bytes of ``shardckpt.json``.

        Raises:
            ValueError: they are not the bytes that were written.
        """
        record = cls.model_validate_json(data)
        head, _, tail = data.rpartition(record.self_digest.encode())
        if hashlib.sha256(head + _NO_DIGEST.encode() + tail).hexdigest() != record.self_digest:
            raise ValueError("its bytes are not those that were written (digest differs)")
        return record


class Integrity(BaseModel):
    """``integrity.json``: digests, in hex, by file name."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    algorithm: str = INTEGRITY_ALGORITHM
    files: Annotated[dict[_Name, str], Field(min_length=1)]

    def dump(self) -> bytes:
        """Return the bytes of ``integrity.json``."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def parse(cls, data: bytes) -> Integrity:
        """Return the digests in the bytes of ``integrity.json``.

        Raises:
            ValueError: they are not such a file.
        """
        return cls.model_validate_json(data)


class Manifest(BaseModel):
    """What a reader knows of a checkpoint before it opens a data file."""

    model_config = ConfigDict(frozen=True)

    backend: str
    version: int
    #: Ours, or None for a checkpoint that another library wrote.
    record: Record | None = None
    #: Set where the checkpoint has no ``metadata.json`` and a strategy recognised it by content.
    recognised_as: str | None = None


__all__ = [
    "INTEGRITY_ALGORITHM",
    "INTEGRITY_LIMIT",
    "INTEGRITY_NAME",
    "MARKER_LIMIT",
    "MARKER_NAME",
    "RECORD_LIMIT",
    "RECORD_NAME",
    "FileRecord",
    "Integrity",
    "Manifest",
    "Marker",
    "Record",
]

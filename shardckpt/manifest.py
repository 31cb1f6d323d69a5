"""The JSON files of a checkpoint, as pydantic models: these models are the specification.

``metadata.json`` has Megatron's four fields and says which strategy reads the rest. ``shardckpt.json`` is ours: who
saved, which files belong to the checkpoint, and their digests. Both are written last, before the commit.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MARKER_NAME = "metadata.json"
RECORD_NAME = "shardckpt.json"
#: Largest size of either file that a reader accepts, in bytes.
MARKER_LIMIT = 1 << 20
RECORD_LIMIT = 1 << 31

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
    """A file of the checkpoint: its size in bytes, who wrote it, its digests (:mod:`shardckpt.storage.digest`)."""

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
    #: SHA-256, in hex, of the file's bytes with zeros in the place of this digest.
    self_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = _NO_DIGEST

    def dump(self) -> bytes:
        """The bytes of ``shardckpt.json``, its own digest among them."""
        text = self.model_copy(update={"self_digest": _NO_DIGEST}).model_dump_json(indent=1)
        return text.replace(_NO_DIGEST, hashlib.sha256(text.encode()).hexdigest()).encode()

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """The record in the bytes of ``shardckpt.json``; a ValueError if they are not the ones that were written."""
        record = cls.model_validate_json(data)
        blank = data.replace(record.self_digest.encode(), _NO_DIGEST.encode())
        if hashlib.sha256(blank).hexdigest() != record.self_digest:
            raise ValueError("its bytes are not those that were written (digest differs)")
        return record


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
    "MARKER_LIMIT",
    "MARKER_NAME",
    "RECORD_LIMIT",
    "RECORD_NAME",
    "FileRecord",
    "Manifest",
    "Marker",
    "Record",
]

"""``shardckpt.json`` without pydantic, which takes longer to import than a checkpoint takes to be listed.

Only records that this library wrote, as it wrote them, are read so; all others are left to the models, which name
faults.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

from shardckpt.manifest.names import (
    NEWEST_FORMAT,
    NO_DIGEST,
    SAVE_ID,
    TABLE_SUFFIX,
    Lineage,
    is_file_name,
    list_files,
)
from shardckpt.manifest.strict_json import parse_json


class PlainFile(NamedTuple):
    """A file of the checkpoint, as :class:`shardckpt.manifest.FileRecord` has it."""

    name: str
    size: int
    rank: int
    keys: int
    digest: str
    segments: str | int

    @property
    def table_name(self) -> str:
        """The path of the table file; ``""`` if there is none."""
        return f"{self.name}{TABLE_SUFFIX}" if isinstance(self.segments, int) else ""

    def list_files(self) -> dict[str, int]:
        """Return the size in bytes, by name, of the file and of its table file, if it has one."""
        return {self.name: self.size} | ({self.table_name: self.segments} if isinstance(self.segments, int) else {})


class PlainRecord(NamedTuple):
    """The content of :class:`shardckpt.manifest.Record`, of the whole checkpoint and of its files."""

    save_id: str
    backend: str
    version: int
    writer: dict[str, str]
    world_size: int
    digest_algorithm: str
    files: tuple[PlainFile, ...]
    lineage: Lineage
    content_metadata: Any
    self_digest: str

    def list_files(self) -> dict[str, int]:
        """Return the size in bytes of every file by its name, table files included."""
        return list_files(self.files)


def parse_plain(marker: bytes, record: bytes) -> PlainRecord | None:
    """Return the record of a checkpoint.

    Args:
        marker: The bytes of ``metadata.json``.
        record: The bytes of ``shardckpt.json``.

    Returns:
        None if they are not as this library writes them, or of several saves.
    """
    try:
        found: Any = parse_json(record)
        said: Any = parse_json(marker)
        digest = found["self_digest"]
        head, _, tail = record.rpartition(digest.encode())
        # its own digest says that the rest is unchanged, and so was checked then
        if hashlib.sha256(head + NO_DIGEST.encode() + tail).hexdigest() != digest or len(digest) != len(NO_DIGEST):
            return None
        if type(found["format"]) is not int or found["format"] not in range(1, NEWEST_FORMAT + 1):
            return None
        plain = PlainRecord(
            found["save_id"],
            found["backend"],
            found["version"],
            found["writer"],
            found["world_size"],
            found["digest_algorithm"],
            tuple(PlainFile(**file) for file in found["files"]),
            Lineage(found.get("parent"), found.get("step")),
            found.get("content_metadata"),
            digest,
        )
        key = {"sharded_backend": plain.backend, "sharded_backend_version": plain.version}
        is_marked = said in (key, {**key, "common_backend": "torch", "common_backend_version": 1})
        is_marked = is_marked and all(type(value) in (str, int) for value in said.values())  # JSON's true equals 1
        return plain if is_marked and _has_types(plain) and all(map(is_file_name, plain.list_files())) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _has_types(plain: PlainRecord) -> bool:
    """Return whether the values have the types of the model: ids, texts, and integers that are exact in JSON."""
    ids = [plain.save_id] if plain.lineage.parent is None else [plain.save_id, plain.lineage.parent]
    texts = [plain.backend, plain.digest_algorithm, *plain.writer.values()]
    numbers = [plain.version, plain.world_size]
    numbers += [] if plain.lineage.step is None else [plain.lineage.step]
    for file in plain.files:
        texts.append(file.digest)
        numbers += [file.size, file.rank, file.keys]
        if not isinstance(file.segments, str):
            numbers.append(file.segments)
    is_text = all(isinstance(text, str) for text in texts) and all(re.fullmatch(SAVE_ID, each) for each in ids)
    return is_text and all(type(number) is int and 0 <= number < 1 << 53 for number in numbers)

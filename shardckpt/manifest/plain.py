"""``shardckpt.json`` without pydantic, which takes longer to import than a checkpoint takes to be listed.

Only records that this library wrote, as it wrote them, are read so; all others are left to the models, which name
faults.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.manifest.names import (
    NEWEST_FORMAT,
    NO_DIGEST,
    SAVE_ID,
    TABLE_SUFFIX,
    Lineage,
    find_folders,
    is_file_name,
    list_files,
)
from shardckpt.manifest.strict_json import parse_json

if TYPE_CHECKING:
    from collections.abc import Collection


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
    reader: str
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
        None if this library did not write them so, or if they are of two saves: the models then name the fault.
    """
    try:
        found: Any = parse_json(record)
        marked: Any = parse_json(marker)
        digest = found["self_digest"]
        head, _, tail = record.rpartition(digest.encode())
        # equal digests: the record is as the save wrote it, which had checked it
        if hashlib.sha256(head + NO_DIGEST.encode() + tail).hexdigest() != digest or len(digest) != len(NO_DIGEST):
            return None
        if type(found["format"]) is not int or found["format"] not in range(1, NEWEST_FORMAT + 1):
            return None
        plain = PlainRecord(
            found["save_id"],
            found["backend"],
            found["version"],
            found["reader"],
            found["writer"],
            found["world_size"],
            found["digest_algorithm"],
            tuple(PlainFile(**file) for file in found["files"]),
            Lineage(found.get("parent"), found.get("step")),
            found.get("content_metadata"),
            digest,
        )
        has_parts = isinstance(found["files"], list) and isinstance(found.get("timings"), dict | None)
        is_right = has_parts and _has_types(plain) and _has_file_names(plain.list_files())
        return plain if is_right and _is_marker_of(plain, marked) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _has_file_names(names: Collection[str]) -> bool:
    """Return whether the names are names of files, none of them a folder of another."""
    return all(map(is_file_name, names)) and find_folders(names).isdisjoint(names)


def _is_marker_of(plain: PlainRecord, marked: dict[str, Any]) -> bool:
    """Return whether a marker is as a save of this library writes it, with or without Megatron's other fields."""
    needed = {"sharded_backend": plain.backend, "sharded_backend_version": plain.version}
    is_equal = marked in (needed, {**needed, "common_backend": "torch", "common_backend_version": 1})
    return is_equal and all(type(value) in (str, int) for value in marked.values())  # JSON's true equals 1


def _has_types(plain: PlainRecord) -> bool:
    """Return whether the values have the types of the model: ids, texts, and integers that are exact in JSON."""
    ids = [plain.save_id] if plain.lineage.parent is None else [plain.save_id, plain.lineage.parent]
    texts = [plain.backend, plain.reader, plain.digest_algorithm, *plain.writer.values()]
    numbers = [plain.version, plain.world_size]
    numbers += [] if plain.lineage.step is None else [plain.lineage.step]
    for file in plain.files:
        texts.append(file.digest)
        numbers += [file.size, file.rank, file.keys]
        if not isinstance(file.segments, str):
            numbers.append(file.segments)
    is_text = all(isinstance(text, str) for text in texts) and all(re.fullmatch(SAVE_ID, each) for each in ids)
    is_number = all(type(number) is int and 0 <= number < 1 << 53 for number in numbers)
    return is_text and is_number and plain.world_size > 0 and all(file.segments != 0 for file in plain.files)

"""Check a checkpoint's files without digests: by the index, and by the headers of the data files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import RECORD_NAME
from shardckpt.storage import LENGTH_BYTES, parse_head, read_header
from shardckpt.strategy import StoredFile, find_error
from shardckpt_safetensors.index import find_part_errors, read_index
from shardckpt_safetensors.index_names import COMMON_FILE, INDEX_FILE
from shardckpt_safetensors.objects import parse_tree_head

if TYPE_CHECKING:
    from shardckpt.errors import CheckpointingException
    from shardckpt.storage import CheckpointReader
    from shardckpt_safetensors.index import StoredIndex


#: Most commas in the header of a data file: those of a million tensors.
_MOST_COMMAS = 1 << 23


def list_files(reader: CheckpointReader) -> list[StoredFile]:
    """Return the files that a checkpoint must have; see :class:`shardckpt.strategy.ChecksFiles`."""
    index = read_index(reader)
    named = [StoredFile(name) for name in (INDEX_FILE, COMMON_FILE, *index.parts)]
    found: dict[str, dict[str, int]] = {name: {} for name in sorted(index.files)}
    for key, item in index.list_items():
        found[item.file][key] = item.offset + item.length
    for name, ends in found.items():
        least = max(ends.values(), default=0)
        keys = ends.keys() - index.plain_objects
        named.append(StoredFile(name, least, tuple(key for key in ends if key in keys), ends))
    lost = [StoredFile(RECORD_NAME)] if _has_lost_record(reader) else []
    return [*lost, *named, *(StoredFile(name, size) for name, size in _list_others(reader).items())]


def check_files(reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
    """Return the error of each of those files, or None; see :class:`shardckpt.strategy.ChecksFiles`."""
    found = {INDEX_FILE: find_error(read_index, reader), COMMON_FILE: find_error(_check_common, reader)}
    if _has_lost_record(reader):
        found[RECORD_NAME] = CorruptCheckpointError(
            f"{reader.directory / RECORD_NAME}, which has the digests of all files, is missing: every save writes it"
        )
    if found[INDEX_FILE] is not None:  # then the data files are unknown
        parts = find_part_errors(reader) if find_error(find_part_errors, reader) is None else {}
        return {**found, **parts} | ({INDEX_FILE: None} if any(parts.values()) else {})
    faults = {name: find_error(_check_head, reader, name) for name in sorted(read_index(reader).files)}
    sound = [name for name, fault in faults.items() if fault is None]
    # without digests, a file that is gone or cut contradicts the index: the file is wrong
    index = read_index(reader).ignoring_sizes(faults.keys() - sound)
    found[INDEX_FILE] = find_error(index.check)
    if found[INDEX_FILE] is None:
        faults |= {name: find_error(_check_payloads, reader, name, index) for name in sound}
    others = {n: find_error(_check_size, reader, n, size) for n, size in _list_others(reader).items()}
    return {**found, **dict.fromkeys(index.parts), **faults, **others}


def _has_lost_record(reader: CheckpointReader) -> bool:
    return reader.manifest.record is None and not reader.has(RECORD_NAME)


def _list_others(reader: CheckpointReader) -> dict[str, int]:
    """Return the sizes of the files for other tools, by name: the record names them, and the index does not."""
    record = reader.manifest.record
    index = read_index(reader)
    known = {INDEX_FILE, COMMON_FILE, *index.files, *index.parts}
    return {} if record is None else {file.name: file.size for file in record.files if file.name not in known}


def _check_size(reader: CheckpointReader, name: str, expected: int) -> None:
    if (size := reader.size(name)) != expected:
        raise CorruptCheckpointError(f"{reader.directory / name} has {size} bytes, and {expected} were written")


def _check_common(reader: CheckpointReader) -> None:
    """Check the header of the common state, and that its tree is JSON; the tensors are not read."""
    size, source = reader.size(COMMON_FILE), f"{reader.directory / COMMON_FILE}"
    parse_tree_head(memoryview(read_header(reader, COMMON_FILE)), size, source)


def _check_head(reader: CheckpointReader, name: str) -> int:
    """Check that a data file opens as safetensors; return the bytes of its header, and of the header's length."""
    head = read_header(reader, name)
    parse_head(head, reader.size(name), f"{reader.directory / name}", _MOST_COMMAS)
    return LENGTH_BYTES + len(head)


def _check_payloads(reader: CheckpointReader, name: str, index: StoredIndex) -> None:
    """Check that the payloads of the index lie behind the header of a data file, and before its end."""
    size, first = reader.size(name), _check_head(reader, name)
    outside = index.find_outside(name, first, size)
    if outside is not None:
        raise CorruptCheckpointError(
            f"{reader.directory / name}: the payload of {outside[0]!r} at byte {outside[1]} is not behind the header "
            f"of {first} bytes, or not before the end of the file at {size}"
        )

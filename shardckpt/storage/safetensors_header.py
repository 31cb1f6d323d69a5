"""The head of a safetensors file: the length of its header, and the header. https://github.com/huggingface/safetensors#format."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest.strict_json import parse_json
from shardckpt.tensors.dtype_names import KNOWN_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardckpt.storage.reader import CheckpointReader

#: Bytes of the header's length, which come first.
LENGTH_BYTES = 8
#: Longest header that readers accept, in bytes.
HEADER_LIMIT = 100_000_000
_ALIGN = 8
_METADATA = "__metadata__"
#: Most commas in the header of a table of columns.
_MOST_PARTS = 1 << 18
#: Most axes of a tensor.
_MOST_AXES = 64
#: Bits of an element, by the format's name of its dtype; of a packed one it counts the values. Names of packed dtypes
#: stand for them alone: a dtype with a byte for each value needs another name.
_BITS = {
    **{known.safetensors_name: 8 * known.itemsize for known in KNOWN_DTYPES if known.safetensors_name},
    **dict.fromkeys(("F4", "F4_E2M1_X2"), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}


class HeaderEntry(NamedTuple):
    """A tensor of a header to be written; its payload follows the payload of the entry before it.

    Attributes:
        name: Its name.
        kind: The format's name of its dtype: ``"BF16"``.
        shape: Its shape, as the header counts it.
        nbytes: Bytes of its payload.
    """

    name: str
    kind: str
    shape: Sequence[int]
    nbytes: int


class FileEntry(NamedTuple):
    """A tensor of a header that was read.

    Attributes:
        kind: The format's name of its dtype.
        shape: Its shape, as the header counts it.
        start: Where its payload begins in the file, in bytes.
        stop: Where its payload ends in the file, in bytes.
    """

    kind: str
    shape: Sequence[int]
    start: int
    stop: int


def encode_header(
    entries: Iterable[HeaderEntry], metadata: Mapping[str, str] | None = None, *, align: int = _ALIGN, rest: int = 0
) -> bytes:
    """Encode the head of a file whose payloads follow in the order of the entries, without holes.

    Args:
        entries: The tensors, of different names.
        metadata: Becomes the header's ``__metadata__``; left out if None.
        align: A multiple of 8.
        rest: The remainder that the size of the head leaves when it is divided by ``align``.

    Returns:
        The header's length in 8 bytes, and the header, padded with spaces so that the payloads begin where they are to.
        The caller checks its length against :data:`HEADER_LIMIT`.
    """
    entries = list(entries)
    parts = [] if metadata is None else [f'"{_METADATA}":{_to_json(dict(metadata))}']
    # text by text: to make a dict of each entry first takes three times as long; no name has a line break in JSON
    names = _to_json([entry.name for entry in entries], "\n")[1:-1].split("\n")
    end = 0
    for name, (_, kind, shape, nbytes) in zip(names, entries, strict=False):  # of no entries there is one empty line
        sizes = ",".join(map(str, shape))
        parts.append(f'{name}:{{"dtype":"{kind}","shape":[{sizes}],"data_offsets":[{end},{end + nbytes}]}}')
        end += nbytes
    text = f"{{{','.join(parts)}}}".encode()
    # by default the data begins at a multiple of 8, so that readers can map every dtype
    text += b" " * ((rest - LENGTH_BYTES - len(text)) % align)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _to_json(value: Any, between: str = ",") -> str:
    return json.dumps(value, separators=(between, ":"), ensure_ascii=False)


def header_length(first: bytes, size: int, source: str, limit: int = HEADER_LIMIT) -> int:
    """Return the length of the header in bytes, by the first 8 bytes of a file of ``size`` bytes.

    Args:
        first: The first 8 bytes.
        size: Bytes of the file.
        source: Named in errors.
        limit: Longest header, in bytes.

    Raises:
        CorruptCheckpointError: the file is too short for such a header, or the header is longer than the limit.
    """
    length = int.from_bytes(first, "little")
    # checked before memory is allocated for the header
    if len(first) < LENGTH_BYTES or length > size - LENGTH_BYTES:
        raise CorruptCheckpointError(f"{source} of {size} bytes is not a safetensors file, or is cut short")
    if length > limit:
        raise CorruptCheckpointError(f"{source} has a header of {length} bytes; readers accept {limit}")
    return length


def read_header(reader: CheckpointReader, name: str) -> bytes:
    """Read the header of a checkpoint's file, without its length, which is checked before memory is taken for it.

    Args:
        reader: Reads the checkpoint.
        name: The file.

    Raises:
        CorruptCheckpointError: as for :func:`header_length`.
    """
    size, source = reader.size(name), f"{reader.directory / name}"
    length = header_length(reader.read_range(name, 0, min(size, LENGTH_BYTES), "the header"), size, source)
    return reader.read_range(name, LENGTH_BYTES, length, "the header")


def parse_head(
    text: bytes | memoryview, size: int, source: str, most_parts: int = _MOST_PARTS
) -> tuple[dict[str, str], dict[str, FileEntry]]:
    """Parse the header of an untrusted file.

    Args:
        text: The header, without its length.
        size: Bytes of the file.
        source: Named in errors.
        most_parts: Most commas outside of strings, which bounds the objects that a hostile one becomes. By default
            enough for a table of columns.

    Returns:
        The metadata, and the tensors by name, whose payloads fill the rest of the file without holes.

    Raises:
        CorruptCheckpointError: it is malformed, names something twice, or contradicts itself or the size.
    """
    try:
        header = parse_json(text, most_parts=most_parts)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not text by name")
        first = LENGTH_BYTES + len(text)
        found = {name: _parse_entry(name, entry, first) for name, entry in header.items()}
        end = first
        for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != end:
                raise ValueError(f"{name!r:.100} begins at byte {entry.start}, expected {end}")
            end = entry.stop
        if end != size:
            raise ValueError(f"payloads end at byte {end} of a file of {size}")
    except ValueError as exc:
        raise CorruptCheckpointError(f"{source}: its safetensors header is damaged: {exc}") from exc
    return metadata, found


def _parse_entry(name: str, entry: Any, first: int) -> FileEntry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r:.100} is malformed")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _is_shape(shape) or not _is_shape(offsets) or len(offsets) != 2:  # noqa: PLR2004 - start and end
        raise ValueError(f"the entry of {name!r:.100} is malformed")
    if not isinstance(kind, str) or kind not in _BITS:
        raise ValueError(f"{name!r:.100} has the dtype {kind!r:.40}, which safetensors does not have")
    start, stop = offsets
    if stop < start or math.prod(shape) * _BITS[kind] != 8 * (stop - start):
        raise ValueError(f"{name!r:.100} of {kind} and shape {shape!r:.200} has {stop - start} bytes")
    return FileEntry(kind, tuple(shape), first + start, first + stop)


def _is_shape(value: Any) -> bool:
    # type, not isinstance: JSON's true is an int too
    if type(value) is not list or len(value) > _MOST_AXES:
        return False
    return all(type(size) is int and size >= 0 for size in value)

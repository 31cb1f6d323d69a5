"""A safetensors file in memory: a tree, and the tensors that it refers to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.storage import HEADER_LIMIT, LENGTH_BYTES, HeaderEntry, encode_header, header_length
from shardckpt_safetensors.objects.json_text import dump_json, parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Bytes of an element, by the names of dtypes that every release of safetensors opens. Others are declared as U8.
ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
#: Most axes of a tensor.
MOST_AXES = 64
_METADATA = "__metadata__"
_TREE = "tree"


class FileTensor(NamedTuple):
    """A tensor of the file: the format's name of its dtype, its shape, its bytes in row-major order."""

    kind: str
    shape: Sequence[int]
    data: memoryview | bytes


class FilePlace(NamedTuple):
    """A tensor that the header declares: its dtype's name, its shape, and where its bytes are behind the header."""

    kind: str
    shape: Sequence[int]
    start: int
    stop: int


def pack_file(tree: Any, tensors: dict[str, FileTensor], what: str) -> bytes:
    """Return the bytes of a file with a tree and tensors by name; ShardingError if its header would be too long."""
    # wide dtypes first: then every tensor begins at a multiple of its element size without padding
    ordered = sorted(tensors.items(), key=lambda item: -ELEMENT_BYTES[item[1].kind])
    entries = [HeaderEntry(name, tensor.kind, tensor.shape, len(tensor.data)) for name, tensor in ordered]
    head = encode_header(entries, {_TREE: dump_json(tree)})
    if len(head) - LENGTH_BYTES > HEADER_LIMIT:
        raise ShardingError(
            f"{what} needs a header of {len(head) - LENGTH_BYTES} bytes; readers accept {HEADER_LIMIT}: make its long "
            "lists tensors or arrays"
        )
    return b"".join([head, *(tensor.data for _, tensor in ordered)])


def parse_file(data: memoryview, what: str) -> tuple[Any, dict[str, FileTensor]]:
    """Return the tree and the tensors of a file, which are views of its bytes.

    Raises:
        CorruptCheckpointError: The file is damaged, or contradicts itself.
    """
    length = header_length(bytes(data[:LENGTH_BYTES]), len(data), what)
    payload = data[LENGTH_BYTES + length :]
    tree, places = parse_tree_head(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data), what)
    tensors = {
        name: FileTensor(kind, shape, payload[start:stop]) for name, (kind, shape, start, stop) in places.items()
    }
    return tree, tensors


def parse_tree_head(header_text: memoryview, size: int, what: str) -> tuple[Any, dict[str, FilePlace]]:
    """Return the tree in a header, and the places of the tensors, which fill the rest of the file.

    Args:
        header_text: The header, without its length.
        size: Bytes of the file.
        what: Named in errors.

    Raises:
        CorruptCheckpointError: It is damaged, or contradicts itself or the size.
    """
    try:
        header = parse_json(header_text)
        if type(header) is not dict:
            raise ValueError("its header is not an object")
        metadata = header.pop(_METADATA, None)
        if type(metadata) is not dict or type(metadata.get(_TREE)) is not str:
            raise ValueError(f"its metadata has no {_TREE!r}")
        spans = sorted((*_span(name, entry), name) for name, entry in header.items())
        end = 0
        for start, stop, name in spans:
            if start != end:
                raise ValueError(f"{name!r:.100} begins at byte {start} of the payload, expected {end}")
            end = stop
        if end != size - LENGTH_BYTES - len(header_text):
            raise ValueError(f"{size - LENGTH_BYTES - len(header_text)} bytes of payload, expected {end}")
        places = {
            name: FilePlace(header[name]["dtype"], tuple(header[name]["shape"]), start, stop)
            for start, stop, name in spans
        }
        return parse_json(metadata[_TREE]), places
    except ValueError as exc:
        raise CorruptCheckpointError(f"{what} is damaged: {exc}") from exc


def is_shape(value: Any) -> bool:
    """Return whether a value from JSON is a shape: a list of few integers, none negative."""
    # type, not isinstance: JSON's true is an int too
    return type(value) is list and len(value) <= MOST_AXES and all(type(n) is int and n >= 0 for n in value)


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Return where a tensor's payload begins and ends; ValueError if its entry in the header is malformed."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r:.100} is malformed")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(kind) is not str or kind not in ELEMENT_BYTES:
        raise ValueError(f"{name!r:.100} has the dtype {kind!r:.40}, which objects do not use")
    if not is_shape(shape) or not is_shape(offsets) or len(offsets) != 2:  # noqa: PLR2004 - the start and the end
        raise ValueError(f"the entry of {name!r:.100} is malformed")
    start, stop = offsets
    if stop - start != math.prod(shape) * ELEMENT_BYTES[kind]:
        raise ValueError(f"{name!r:.100} of {kind} and shape {shape} has {stop - start} bytes")
    return start, stop

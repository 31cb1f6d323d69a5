"""A safetensors file in memory: a tree of JSON values in its metadata, and the tensors that the tree refers to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.storage import (
    HEADER_LIMIT,
    LENGTH_BYTES,
    HeaderEntry,
    ParseCache,
    encode_header,
    header_length,
    parse_head,
)
from shardckpt_safetensors.dtype_names import HEADER_BYTES
from shardckpt_safetensors.objects.json_text import dump_padded, parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.storage import FileEntry

#: Most axes of a tensor.
MOST_AXES = 64
_TREE = "tree"
#: Most commas outside of strings in a header, as a million tensors have: a bound for hostile headers.
_MOST_COMMAS = 1 << 23
#: Parsed headers of small files: many objects of a checkpoint, and of its next load, have equal ones.
_heads = ParseCache[tuple[Any, "dict[str, FileEntry]"]]()


class FileTensor(NamedTuple):
    """A tensor of the file: the format's name of its dtype, its shape, its bytes in row-major order."""

    kind: str
    shape: Sequence[int]
    data: memoryview | bytes


def pack_file(tree: Any, tensors: dict[str, FileTensor], what: str) -> bytes:
    """Return the bytes of a file with a tree and tensors by name; ShardingError if its header would be too long."""
    # wide dtypes first: every tensor then begins at a multiple of its element size, without padding
    ordered = sorted(tensors.items(), key=lambda item: -HEADER_BYTES[item[1].kind])
    entries = [HeaderEntry(name, tensor.kind, tensor.shape, len(tensor.data)) for name, tensor in ordered]
    head = encode_header(entries, {_TREE: dump_padded(tree)})
    if len(head) - LENGTH_BYTES > HEADER_LIMIT:
        raise ShardingError(
            f"{what} needs a header of {len(head) - LENGTH_BYTES} bytes; readers accept {HEADER_LIMIT}: make its long "
            "lists tensors or arrays"
        )
    return b"".join([head, *(tensor.data for _, tensor in ordered)])


def parse_file(data: memoryview, what: str) -> tuple[Any, dict[str, FileTensor]]:
    """Return the tree and the tensors of a file; the tensors are views of its bytes.

    Files with equal headers share one tree: do not change it.
    """
    length = header_length(bytes(data[:LENGTH_BYTES]), len(data), what)
    text = data[LENGTH_BYTES : LENGTH_BYTES + length]
    tree, entries = _heads.get(text, (len(data), what), lambda: parse_tree_head(text, len(data), what))
    tensors = {name: FileTensor(kind, shape, data[start:stop]) for name, (kind, shape, start, stop) in entries.items()}
    return tree, tensors


def parse_tree_head(text: bytes | memoryview, size: int, what: str) -> tuple[Any, dict[str, FileEntry]]:
    """Return the tree in a header, and the entry of each tensor, by name: their bytes fill the rest of the file."""
    metadata, entries = parse_head(text, size, f"{what} is damaged", _MOST_COMMAS)
    for name, entry in entries.items():
        if entry.kind not in HEADER_BYTES:
            raise CorruptCheckpointError(
                f"{what} is damaged: {name!r:.100} has the dtype {entry.kind!r:.40}, which objects do not use"
            )
    if _TREE not in metadata:
        raise CorruptCheckpointError(f"{what} is damaged: its metadata has no {_TREE!r}")
    try:
        return parse_json(metadata[_TREE]), entries
    except ValueError as exc:
        raise CorruptCheckpointError(f"{what} is damaged: {exc}") from exc


def is_shape(value: Any) -> bool:
    """Return whether a value from JSON is a shape: a list of at most ``MOST_AXES`` integers, none negative."""
    # type, not isinstance: JSON's true is a bool, which is an int, too
    return type(value) is list and len(value) <= MOST_AXES and all(type(n) is int and n >= 0 for n in value)

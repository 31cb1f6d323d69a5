"""The head of a safetensors file: the length of its header, and the header. https://github.com/huggingface/safetensors#format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: Bytes of the header's length, which come first.
LENGTH_BYTES = 8
#: Longest header that readers accept, in bytes.
HEADER_LIMIT = 100_000_000
_ALIGN = 8


class HeaderEntry(NamedTuple):
    """A tensor that a header declares.

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


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode the head of a file whose payloads follow in the order of the entries, without holes.

    Args:
        entries: The tensors, of different names.
        metadata: Becomes the header's ``__metadata__``; left out if None.

    Returns:
        The header's length in 8 bytes, and the header, padded with spaces to a multiple of 8 bytes. The caller checks
        it against :data:`HEADER_LIMIT`.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, kind, shape, nbytes in entries:
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # the data begins at a multiple of 8, so that readers can map every dtype
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_length(first: bytes, size: int, source: str) -> int:
    """Return the length of the header in bytes, by the first 8 bytes of a file of ``size`` bytes.

    Raises:
        CorruptCheckpointError: the file is too short for such a header, or the header is longer than readers accept.
    """
    length = int.from_bytes(first, "little")
    # checked before memory is allocated for the header
    if len(first) < LENGTH_BYTES or length > min(HEADER_LIMIT, size - LENGTH_BYTES):
        raise CorruptCheckpointError(f"{source} of {size} bytes is not a safetensors file, or is cut short")
    return length

"""Encode and parse the header of a safetensors file: its tensors and their offsets. https://github.com/huggingface/safetensors#format."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, listed, natural_order
from shardckpt.huggingface.dtypes import from_safetensors, safetensors_name, torch_shape, written_shape
from shardckpt.huggingface.names import ORIGIN
from shardckpt.manifest.strict_json import parse_json
from shardckpt.storage.digest import SMALL_RECORD
from shardckpt.storage.safetensors_header import HEADER_LIMIT, LENGTH_BYTES, HeaderEntry, encode_header
from shardckpt.tensors.memory import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.planning.boxes import Ints

_METADATA = "__metadata__"
#: An entry of the metadata that is not the name of a tied tensor.
_FORMAT = "format"
#: The room after payloads of odd sizes, so that the next begins at a multiple of every element's size; in bytes.
_ALIGN = 64
#: The alignment that payloads of full pages leave behind; smaller ones are sorted behind it.
_PAGED = 0, 0


class TensorSpan(NamedTuple):
    """A tensor, and the offsets of its first byte and of the byte after its last in the file."""

    tensor: HubTensor
    start: int
    stop: int


class FramePart(NamedTuple):
    """Bytes of a file that are no tensor of a checkpoint, and their offset: a header."""

    start: int
    data: bytes

    @property
    def stop(self) -> int:
        """Offset of the byte after its last."""
        return self.start + len(self.data)


class FileLayout(NamedTuple):
    """The layout of a file that is to be written: every byte is of the frame or of a tensor, both in file order.

    ``rest`` says, of a file of safetensors, where those tensors begin that do not fill pages, or are small.
    """

    frame: list[FramePart]
    tensors: list[TensorSpan]
    rest: int = 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return max(self.frame[-1].stop, self.tensors[-1].stop if self.tensors else 0)

    def find_tensor(self, at: int) -> int:
        """Return the number of the tensor that has a byte of the file; a byte of a header is an IndexError."""
        number = bisect_right(self.tensors, at, key=lambda span: span.start) - 1
        if number < 0 or at >= self.tensors[number].stop:
            raise IndexError(f"byte {at} is of no tensor")
        return number


class FileTensor(NamedTuple):
    """A tensor in a file: its dtype by the format's name, its shape as torch has it, its offset in bytes, and the file.

    The header alone does not say which file it is of: ``""`` until a folder knows it.
    """

    kind: str
    shape: Ints
    start: int
    file: str = ""

    @property
    def dtype(self) -> torch.dtype | None:
        """Its dtype; None if this torch lacks it."""
        return from_safetensors(self.kind)

    @property
    def stop(self) -> int | None:
        """Offset of the byte after its last; None if this torch lacks its dtype."""
        return None if self.dtype is None else self.start + math.prod(self.shape) * self.dtype.itemsize

    def find_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the tensor, of this name; raise CorruptCheckpointError if this torch lacks it."""
        if self.dtype is None:
            raise CorruptCheckpointError(
                f"{name!r} in {self.file} has the dtype {self.kind}, which this release of torch lacks"
            )
        return self.dtype


def lay_out(tensors: Sequence[HubTensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Return the layout of a file of safetensors that is to be written; whichever door writes it, it is the same.

    Payloads of full pages come first, and begin at pages: ranks that write a file together write pages of their own,
    and readers can map them. Those of odd sizes come last, large elements before small ones: each payload begins at a
    multiple of its element without padding, which the format forbids. ``format: pt`` is added to the metadata, without
    which transformers refuses a file. A header that is longer than readers accept is an error.
    """
    ordered = sorted(tensors, key=lambda tensor: (*_find_alignment(tensor), natural_order(tensor.name)))
    entries = []
    for tensor in ordered:
        kind = safetensors_name(tensor.dtype) or ""
        entries.append(HeaderEntry(tensor.name, kind, written_shape(kind, tensor.shape), tensor.nbytes))
    paged = sum(_find_alignment(tensor) == _PAGED for tensor in tensors)
    head = encode_header(entries, {**(metadata or {}), _FORMAT: "pt"}, align=PAGE if paged else _ALIGN)
    if len(head) - LENGTH_BYTES > HEADER_LIMIT:
        raise CheckpointingException(
            f"{len(tensors)} tensors in one file need a header of {len(head) - LENGTH_BYTES} bytes; readers accept "
            f"{HEADER_LIMIT}: pass a smaller max_shard_size"
        )
    bounds = list(accumulate((entry.nbytes for entry in entries), initial=len(head)))
    spans = list(map(TensorSpan, ordered, bounds, bounds[1:]))
    return FileLayout([FramePart(0, head)], spans, rest=bounds[paged])


def _find_alignment(tensor: HubTensor) -> tuple[int, int]:
    """Return the first sort key of the payloads of a file: the alignment behind them, by their sizes."""
    if tensor.nbytes % PAGE == 0 and tensor.nbytes > SMALL_RECORD:
        return _PAGED
    return (1, 0) if tensor.nbytes % _ALIGN == 0 else (2, -tensor.dtype.itemsize)


def refuse_unknown(tensors: Iterable[HubTensor]) -> None:
    """Raise CheckpointingException if safetensors files cannot hold some tensors, by their names and dtypes."""
    refused = []
    for name, dtype, *_ in tensors:
        if not _is_text(name):
            raise CheckpointingException(
                f"{name!r:.200} cannot be a tensor's name in a safetensors file, where names are text in UTF-8: rename "
                "the tensor, leave it out, or write .bin files"
            )
        if name == _METADATA:
            # readers would take the tensor's entry for the file's metadata
            raise CheckpointingException(
                f"{name!r} cannot be a tensor's name in a safetensors file, whose header has its metadata there: "
                "rename the tensor, leave it out, or write .bin files"
            )
        if safetensors_name(dtype) is None:
            refused.append(f"{name!r} ({dtype})")
    if refused:
        raise CheckpointingException(
            f"safetensors has no dtype for {listed(refused)}: write .bin files, which hold any, or leave these out"
        )


def _is_text(name: object) -> bool:
    try:
        return isinstance(name, str) and bool(name.isascii() or name.encode())
    except UnicodeEncodeError:
        return False


def parse_head(text: bytes, size: int, source: str) -> tuple[dict[str, FileTensor], dict[str, Any]]:
    """Return the tensors of a file of ``size`` bytes by name, tied ones by every name, and the file's metadata.

    The tensors' bytes lie within the file.
    """
    first = LENGTH_BYTES + len(text)
    try:
        entries = parse_json(text)
        metadata = entries.pop(_METADATA, None) or {}
        found = {name: _entry(entry, first, size) for name, entry in entries.items()}
        # of tied tensors, a file has one, and its metadata maps the other names to it
        tied = {name: other for name, other in metadata.items() if name != _FORMAT and not name.startswith(ORIGIN)}
        found = {name: found[other] for name, other in tied.items() if other in found} | found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{source}: its header is damaged, or the file is cut short ({exc})") from exc
    return found, metadata


def _entry(entry: Any, first: int, size: int) -> FileTensor:
    kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    # type, not isinstance: JSON's true is an int too
    numbers = (*shape, start, stop)
    if not isinstance(kind, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"not a tensor: {entry!r:.200}")
    if start > stop or first + stop > size:
        raise ValueError(f"bytes {first + start} to {first + stop} of a file of {size}")
    dtype = from_safetensors(kind)
    shape = torch_shape(kind, shape)
    if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{stop - start} bytes for {kind} of shape {shape}")
    return FileTensor(kind, shape, first + start)

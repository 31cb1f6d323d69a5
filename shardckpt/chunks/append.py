"""Append tensors to a file, with the bytes that a format puts before and after their values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException
from shardckpt.storage.digest import SMALL_RECORD
from shardckpt.tensors.copier import Copier
from shardckpt.tensors.memory import LARGE, is_ordinary, is_plain, plain_cpu, tensor_bytes, tensor_bytes_of_each

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from shardckpt.storage.file_writer import FileWriter


#: Bytes that are copied at a time of a tensor that cannot be written from its memory (on a device, or with strides). It
#: is less than the writer cuts, so that the writer can append such a piece to others before the next is copied.
PIECE_BYTES = LARGE // 2
#: Small tensors that are appended by one call: enough to save time, and few enough that files are written alternately.
_MOST_IN_RUN = 128


def append_tensor(file: FileWriter, tensor: torch.Tensor, key: str, head: bytes = b"", tail: bytes = b"") -> None:
    """Append the values of a tensor to a file, row by row: any tensor that :func:`shardckpt.tensors.plain_cpu` accepts.

    ``head`` and ``tail`` are bytes to put before and after the values, at most 64 KiB each. A tensor without values
    that can be read is a ShardingError, a DeferredTensor whose values cannot be read a CheckpointingException.
    """
    nbytes = tensor.numel() * tensor.dtype.itemsize + len(head) + len(tail)
    if nbytes <= SMALL_RECORD and is_ordinary(tensor):
        file.append_small((head, tensor_bytes(tensor), tail), what=key)
        return
    if nbytes <= PIECE_BYTES or is_ordinary(tensor) or not is_plain(tensor):
        file.append(nbytes, partial(_list_parts, memoryview(head), tensor, memoryview(tail), key), what=key)
        return
    # A large tensor that must be copied: in pieces, so that the copies take bounded memory.
    if head:
        file.append_small((head,), what=key)
    copies = Copier(tensor, PIECE_BYTES)
    keys = 0 if head else 1
    for piece in copies.pieces():
        file.append(piece.nbytes, partial(copies.copy_piece, piece), keys, what=key)
        keys = 0
    if tail:
        file.append_small((tail,), keys=0, what=key)


def cut_runs(sizes: Sequence[int]) -> Iterator[range]:
    """Cut the tensors of a file, by number, into runs for :func:`append_run`: small ones together, others alone."""
    start = 0
    for number, nbytes in enumerate(sizes):
        is_small = nbytes <= SMALL_RECORD
        if start < number and (not is_small or number - start == _MOST_IN_RUN):
            yield range(start, number)
            start = number
        if not is_small:
            yield range(number, number + 1)
            start = number + 1
    if start < len(sizes):
        yield range(start, len(sizes))


def append_run(
    file: FileWriter, tensors: Sequence[torch.Tensor], keys: Sequence[str], frames: Sequence[tuple[bytes, bytes]]
) -> None:
    """Append the values of tensors to a file, as :func:`append_tensor` appends a single tensor's.

    ``frames`` has the bytes to put before and after the values of each.
    """
    # A call for each small tensor takes several times as long as to copy it.
    found = tensor_bytes_of_each(tensors) if len(tensors) > 1 else None
    if found is None:
        for tensor, key, (head, tail) in zip(tensors, keys, frames, strict=True):
            append_tensor(file, tensor, key, head, tail)
        return
    records = [
        b"".join((head, values, tail)) if head or tail else values
        for values, (head, tail) in zip(found, frames, strict=True)
    ]
    file.append_each(records, keys)


def _list_parts(head: memoryview, tensor: torch.Tensor, tail: memoryview, key: str) -> list[memoryview]:
    """Return the bytes of a tensor's values, between the bytes before and after them."""
    try:
        return [head, tensor_bytes(plain_cpu(tensor)), tail]
    except CheckpointingException as exc:
        raise type(exc)(f"tensor {key!r}: {exc}") from exc

"""Append a tensor to a file, with the bytes that a format puts before and after its values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.storage import SEGMENT_BYTES, SMALL_RECORD
from shardckpt.tensors import Copier, is_ordinary, is_plain, plain_cpu, tensor_bytes

if TYPE_CHECKING:
    import torch

    from shardckpt.storage import FileWriter


#: Bytes that are copied at a time of a tensor that cannot be written from its memory (on a device, or with strides). It
#: is less than a segment, so that the writer can append such a piece to others before the next is copied.
PIECE_BYTES = SEGMENT_BYTES // 2


def append_tensor(file: FileWriter, tensor: torch.Tensor, key: str, head: bytes = b"", tail: bytes = b"") -> None:
    """Append the values of a tensor to a file, row by row.

    Args:
        file: The file.
        tensor: Any tensor that :func:`shardckpt.tensors.plain_cpu` accepts.
        key: Its key, for errors.
        head: Bytes to put before the values, at most 64 KiB.
        tail: Bytes to put after them, at most 64 KiB.

    Raises:
        ShardingError: The tensor's values cannot be read.
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


def _list_parts(head: memoryview, tensor: torch.Tensor, tail: memoryview, key: str) -> list[memoryview]:
    """Return the bytes of a tensor's values, between the bytes before and after them."""
    try:
        return [head, tensor_bytes(plain_cpu(tensor)), tail]
    except CheckpointingException as exc:
        raise ShardingError(f"tensor {key!r}: {exc}") from exc

"""Tensors on devices or with strides as bytes: one piece after the other, through one small buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.tensors.memory import LARGE, synchronize_devices, tensor_bytes
from shardckpt.tensors.wrappers import movable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Copier:
    """Copies a tensor to the CPU piece by piece, through one buffer (pinned for a CUDA tensor).

    The tensor has memory of its own, on any device, of any strides. A piece has ``most`` bytes at most, which is less
    than ``LARGE`` (else a ValueError), so that a writer copies the piece into a block at once: it would write a larger
    one later, from this buffer, which holds the next piece by then.
    """

    def __init__(self, tensor: torch.Tensor, most: int) -> None:
        if most >= LARGE:
            raise ValueError(f"pieces of {most} bytes are written from where they are; give fewer than {LARGE}")
        self._tensor = tensor.detach()
        self._most = most
        self._buffer = torch.empty(most, dtype=torch.uint8, device="cpu", pin_memory=tensor.is_cuda)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Return an iterator of views of at most ``most`` bytes that make up the tensor in row-major order."""
        return _cut(self._tensor, self._most)

    def copy_piece(self, piece: torch.Tensor) -> list[memoryview]:
        """Copy a piece to the buffer, and return its bytes, which are valid until the next call."""
        copy = self._buffer[: piece.nbytes].view(piece.dtype).view(piece.shape)
        movable(copy).copy_(movable(piece), non_blocking=True)
        synchronize_devices([piece])
        return [tensor_bytes(copy)]


def _cut(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    if tensor.nbytes <= most or not tensor.dim():
        yield tensor
        return
    rows = most // (tensor.nbytes // tensor.shape[0])
    for start in range(0, tensor.shape[0], max(rows, 1)):
        if rows:
            yield tensor[start : start + rows]
        else:
            yield from _cut(tensor[start], most)

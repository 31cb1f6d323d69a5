"""Tensors on devices and with strides as bytes, a piece after another through one small buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.tensors.memory import LARGE, synchronize_devices, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


class Copier:
    """Copies a tensor's values, a piece at a time; pinned memory takes those of a CUDA device.

    Args:
        tensor: On any device, of any strides, with memory of its own.
        most: Bytes of a piece at most: less than ``LARGE``, so that a writer joins it with others before the next.

    Raises:
        ValueError: pieces would be large, and written from the buffer when the next is there already.
    """

    def __init__(self, tensor: torch.Tensor, most: int) -> None:
        if most >= LARGE:
            raise ValueError(f"pieces of {most} bytes are written from where they are; give fewer than {LARGE}")
        self._tensor = tensor.detach()
        self._most = most
        self._buffer = torch.empty(most, dtype=torch.uint8, device="cpu", pin_memory=tensor.is_cuda)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Views that, one after the other in row-major order, are the tensor."""
        return _cut(self._tensor, self._most)

    def copied(self, piece: torch.Tensor) -> list[memoryview]:
        """The bytes of a piece's values; they hold until the next piece is copied."""
        copy = self._buffer[: piece.nbytes].view(piece.dtype).view(piece.shape)
        copy.copy_(piece, non_blocking=True)
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


__all__ = ["Copier"]

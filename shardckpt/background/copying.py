"""Copying tensors into a run of memory at its speed: large ones by several threads, small ones without ceremony."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.storage.memory import LARGE, PAGE, is_ordinary, is_plain, page_place, plain_cpu, synchronize_devices
from shardckpt.storage.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

#: Where a tensor begins, in bytes: torch's own allocator aligns to it, and so do the largest elements.
_ALIGNED = 64
#: Smaller tensors are copied by the calling thread: handing them over costs more than copying them.
_LARGE = LARGE
#: Bytes that a thread takes at a time.
_PIECE = 32 << 20


_Move = tuple[int, int, int]  # to an address, from another, so many bytes


@dataclass(frozen=True)
class Layout:
    """Where tensors stand in a run of memory; a list has an entry for each.

    Attributes:
        offsets: Of the first bytes.
        sizes: In bytes.
        dtypes: Their dtypes.
        shapes: Their shapes.
        nbytes: Of all together.
    """

    offsets: list[int]
    sizes: list[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Places for copies of the tensors, one after the other; a large one lies in its page as the tensor does.

        (Files are laid out so that they can be written from such a place past the page cache.)
        """
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        offsets = []
        end = 0
        for tensor, nbytes in zip(tensors, sizes, strict=True):
            if nbytes >= _LARGE:
                end += (page_place(tensor) - end) % PAGE
            offsets.append(end)
            end += -(-nbytes // _ALIGNED) * _ALIGNED
        return cls(offsets, sizes, [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors], end)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors there."""
        return [self.view(number, memory) for number in range(len(self.sizes))]

    def view(self, number: int, memory: torch.Tensor) -> torch.Tensor:
        """One of the tensors."""
        start = self.offsets[number]
        found = memory[start : start + self.sizes[number]].view(self.dtypes[number])
        return found.view(self.shapes[number])


class Copies:
    """What copying tensors takes.

    Args:
        keys: Whose they are, for errors.
        tensors: On any device, of any strides, quantized ones too.
    """

    def __init__(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self.layout = Layout.of(tensors)
        self._addresses = [_address(tensor) for tensor in tensors]
        self._others = [(n, keys[n], tensors[n]) for n, address in enumerate(self._addresses) if not address]

    @property
    def uses_cuda(self) -> bool:
        """Whether any tensor is on a CUDA device."""
        return any(tensor.device.type == "cuda" for _, _, tensor in self._others)

    def run(self, memory: torch.Tensor) -> None:
        """Copy the tensors.

        Args:
            memory: Bytes that they fit into; pinned, if any tensor is on a CUDA device.

        Raises:
            ShardingError: a tensor has no memory of its own that holds its values.
        """
        try:
            for number, key, tensor in self._others:
                _copy(key, tensor, self.layout.view(number, memory))
            self._move_all(memory.data_ptr())
        finally:  # after an error too: a copy still under way would land in what the next save has staged
            synchronize_devices(tensor for _, _, tensor in self._others)

    def _move_all(self, base: int) -> None:
        sizes = self.layout.sizes
        columns = zip(self.layout.offsets, self._addresses, sizes, strict=True)
        small = ((base + to, source, size) for to, source, size in columns if source and size < _LARGE)
        large = [n for n, size in enumerate(sizes) if size >= _LARGE and self._addresses[n]]
        if not large:
            _move(small)
            return
        moves = ((base + self.layout.offsets[n], self._addresses[n], sizes[n]) for n in large)
        workers = Workers(settings.io_threads(), "shardckpt-stage")
        workers.each(_move, enumerate(_pieces(moves)), [(-1, small)])


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's values lie in a row, as they are; 0 if they do not, or that is not known at a glance."""
    return tensor.data_ptr() if is_ordinary(tensor) else 0


def _move(moves: Iterable[_Move]) -> None:
    move = ctypes.memmove
    for target, source, nbytes in moves:
        move(target, source, nbytes)


def _pieces(moves: Iterable[_Move]) -> Iterator[list[_Move]]:
    for target, source, nbytes in moves:
        for start in range(0, nbytes, _PIECE):
            yield [(target + start, source + start, min(_PIECE, nbytes - start))]


def _copy(key: str, tensor: torch.Tensor, into: torch.Tensor) -> None:
    try:
        values = tensor.detach() if is_plain(tensor) else plain_cpu(tensor)
    except CheckpointingException as exc:
        raise ShardingError(f"tensor {key!r}: {exc}") from exc
    into.copy_(values, non_blocking=True)


__all__ = ["Copies", "Layout"]

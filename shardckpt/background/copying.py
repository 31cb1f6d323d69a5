"""Copy tensors into one staging buffer with several threads: large tensors in pieces, small ones in batches."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardckpt import settings
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.storage import Workers
from shardckpt.tensors import (
    LARGE,
    PAGE,
    copy_each,
    has_values_on_host,
    is_ordinary,
    is_plain,
    page_offset,
    plain_cpu,
    synchronize_devices,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Tensors begin at multiples of this, in bytes, as in torch's allocator: enough for the largest elements.
_ALIGNED = 64
#: Bytes. A larger tensor gets the same offset in its page as the caller's tensor has.
_LARGE = LARGE
#: Bytes of larger tensors that a thread copies at a time.
_PIECE = 8 << 20
#: Most elements of a small tensor: to copy more, torch would start threads of its own.
_FEW = 32768
#: Small tensors that a thread copies at a time.
_BATCH = 256

#: Dtypes whose tensors are copied as bytes, not by torch: it cannot copy integers narrower than a byte, normalizes
#: bools to 0 and 1, and keeps the scales of quantized dtypes elsewhere.
_BY_BYTES = re.compile(r"torch\.(bool|bit|u?int[1-7]|qu?int.*)")
_Move = tuple[int, int, int]  # target address, source address, number of bytes


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a buffer of ``nbytes`` bytes: each list has one entry for each tensor, in bytes."""

    offsets: list[int]
    sizes: list[int]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Return a layout for copies of the tensors, one after the other.

        The copy of a large tensor has the same address modulo the page size as the tensor: files are laid
        out so that a direct write can take a tensor from such an address, without another copy.
        """
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        offsets = []
        end = 0
        for tensor, nbytes in zip(tensors, sizes, strict=True):
            if nbytes >= _LARGE:
                end += (page_offset(tensor) - end) % PAGE
            offsets.append(end)
            end += -(-nbytes // _ALIGNED) * _ALIGNED
        shapes = [tuple(tensor.shape) for tensor in tensors]
        return cls(offsets, sizes, [tensor.dtype for tensor in tensors], shapes, end)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as contiguous views of a uint8 tensor; every element size divides its size."""
        typed = {dtype: memory.view(dtype) for dtype in set(self.dtypes)}
        strides = {shape: torch.empty(shape, device="meta").stride() for shape in set(self.shapes)}
        columns = zip(self.offsets, self.dtypes, self.shapes, strict=True)
        return [
            typed[dtype].as_strided(shape, strides[shape], offset // dtype.itemsize) for offset, dtype, shape in columns
        ]


class Copies:
    """A plan to copy tensors, which sorts them by the way they are copied.

    Args:
        keys: Of the tensors, for errors.
        tensors: On any device, of any strides, quantized ones included.
        layout: The layout of an earlier copy of tensors with the same dtypes and shapes, to be reused.

    Raises:
        ShardingError: the tensors are not those that the layout is for.
    """

    def __init__(self, keys: Sequence[str], tensors: Sequence[torch.Tensor], layout: Layout | None = None) -> None:
        self.layout = Layout.of(tensors) if layout is None else layout
        self._keys = keys
        self._tensors = tensors
        self._small: list[int] = []
        self._rows: list[int] = []
        self._others: list[int] = []
        copied = {dtype for dtype in set(self.layout.dtypes) if not _BY_BYTES.fullmatch(str(dtype))}
        columns = zip(tensors, self.layout.dtypes, self.layout.sizes, strict=True)
        for number, (tensor, dtype, nbytes) in enumerate(columns):
            count = tensor.numel()
            if count * dtype.itemsize != nbytes or tensor.dtype != dtype:
                raise ShardingError(
                    f"tensor {keys[number]!r}: {count} of {tensor.dtype}, not {nbytes} bytes of {dtype}"
                )
            if count <= _FEW and dtype in copied and has_values_on_host(tensor):
                self._small.append(number)
            else:
                (self._rows if is_ordinary(tensor) else self._others).append(number)

    @property
    def uses_cuda(self) -> bool:
        """Whether any tensor is on a CUDA device."""
        return any(self._tensors[n].device.type == "cuda" for n in self._others)

    def run(self, views: Sequence[torch.Tensor]) -> None:
        """Copy the tensors into :meth:`Layout.views` of a buffer, which is pinned if any tensor is on a CUDA device.

        Raises:
            ShardingError: a tensor has no memory of its own that holds its values.
        """
        try:
            # first the devices' copies: they run while the threads below copy from the host's memory
            for number in self._others:
                _copy(self._keys[number], self._tensors[number], views[number])
            jobs = [*self._moves(views), *self._batches(views)]
            if self.layout.nbytes < LARGE:
                for job in jobs:
                    job()
            else:
                Workers(settings.io_threads(), "shardckpt-stage").each(lambda job: job(), enumerate(jobs))
        finally:  # after an error too: a copy in flight would overwrite what the next save stages here
            synchronize_devices(self._tensors[n] for n in self._others)

    def _moves(self, views: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
        """Yield functions that copy the contiguous tensors, about ``_PIECE`` bytes each."""
        moves: list[_Move] = []
        ahead = 0
        for number in self._rows:
            target, source = views[number].data_ptr(), self._tensors[number].data_ptr()
            for start in range(0, self.layout.sizes[number], _PIECE):
                nbytes = min(_PIECE, self.layout.sizes[number] - start)
                moves.append((target + start, source + start, nbytes))
                ahead += nbytes
                if ahead >= _PIECE:
                    yield partial(_move, moves)
                    moves, ahead = [], 0
        yield partial(_move, moves)

    def _batches(self, views: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
        """Yield functions that copy the small tensors, ``_BATCH`` each."""
        for start in range(0, len(self._small), _BATCH):
            batch = self._small[start : start + _BATCH]
            yield partial(self._copy_batch, batch, views)

    def _copy_batch(self, batch: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        try:
            copy_each([views[n] for n in batch], [self._tensors[n] for n in batch])
        except RuntimeError:
            for number in batch:  # one by one, so that the error names the tensor
                _copy(self._keys[number], self._tensors[number], views[number])
            raise


def _move(moves: Sequence[_Move]) -> None:
    for target, source, nbytes in moves:
        ctypes.memmove(target, source, nbytes)  # ctypes releases the GIL: other threads copy meanwhile


def _copy(key: str, tensor: torch.Tensor, into: torch.Tensor) -> None:
    try:
        values = tensor.detach() if is_plain(tensor) else plain_cpu(tensor)
    except CheckpointingException as exc:
        raise ShardingError(f"tensor {key!r}: {exc}") from exc
    into.copy_(values, non_blocking=True)

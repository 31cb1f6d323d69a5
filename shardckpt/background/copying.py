"""Copying tensors into a run of memory at its speed: large ones in pieces, small ones many at a time, by threads."""

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
    has_values_here,
    is_ordinary,
    is_plain,
    page_place,
    plain_cpu,
    synchronize_devices,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Where a tensor begins, in bytes: torch's own allocator aligns to it, and so do the largest elements.
_ALIGNED = 64
#: From this size on, in bytes, tensors have the place in their page that the caller's have.
_LARGE = LARGE
#: Bytes of other tensors that a thread takes at a time.
_PIECE = 8 << 20
#: Elements that torch copies in the thread that calls it: it would start threads of its own for more.
_FEW = 32768
#: Small tensors that a thread takes at a time.
_BATCH = 256

#: Dtypes whose tensors are copied as bytes: torch has no copy of integers of less than a byte, makes bools what they
#: mean, and has the scales of quantized ones elsewhere.
_BY_BYTES = re.compile(r"torch\.(bool|bit|u?int[1-7]|qu?int.*)")
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
    shapes: list[tuple[int, ...]]
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
        shapes = [tuple(tensor.shape) for tensor in tensors]
        return cls(offsets, sizes, [tensor.dtype for tensor in tensors], shapes, end)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors there.

        Args:
            memory: Whole bytes of the largest element.
        """
        typed = {dtype: memory.view(dtype) for dtype in set(self.dtypes)}
        strides = {shape: torch.empty(shape, device="meta").stride() for shape in set(self.shapes)}
        columns = zip(self.offsets, self.dtypes, self.shapes, strict=True)
        return [
            typed[dtype].as_strided(shape, strides[shape], offset // dtype.itemsize) for offset, dtype, shape in columns
        ]


class Copies:
    """What copying tensors takes.

    Args:
        keys: Whose they are, for errors.
        tensors: On any device, of any strides, quantized ones too.
        layout: Of an earlier copy of tensors with the same dtypes and shapes, to use it again.

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
            if count <= _FEW and dtype in copied and has_values_here(tensor):
                self._small.append(number)
            else:
                (self._rows if is_ordinary(tensor) else self._others).append(number)

    @property
    def uses_cuda(self) -> bool:
        """Whether any tensor is on a CUDA device."""
        return any(self._tensors[n].device.type == "cuda" for n in self._others)

    def run(self, views: Sequence[torch.Tensor]) -> None:
        """Copy the tensors.

        Args:
            views: Where they go: :meth:`Layout.views` of memory, pinned if any tensor is on a CUDA device.

        Raises:
            ShardingError: a tensor has no memory of its own that holds its values.
        """
        try:
            for number in self._others:
                _copy(self._keys[number], self._tensors[number], views[number])
            jobs = [*self._moves(views), *self._batches(views)]
            if self.layout.nbytes < LARGE:
                for job in jobs:
                    job()
            else:
                Workers(settings.io_threads(), "shardckpt-stage").each(lambda job: job(), enumerate(jobs))
        finally:  # after an error too: a copy still under way would land in what the next save has staged
            synchronize_devices(self._tensors[n] for n in self._others)

    def _moves(self, views: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
        """What copies the tensors whose values lie in a row."""
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
        """What copies the small ones."""
        for start in range(0, len(self._small), _BATCH):
            batch = self._small[start : start + _BATCH]
            yield partial(self._copy_batch, batch, views)

    def _copy_batch(self, batch: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        try:
            copy_each([views[n] for n in batch], [self._tensors[n] for n in batch])
        except RuntimeError:
            for number in batch:  # one of them by one, to say which
                _copy(self._keys[number], self._tensors[number], views[number])
            raise


def _move(moves: Sequence[_Move]) -> None:
    for target, source, nbytes in moves:
        ctypes.memmove(target, source, nbytes)


def _copy(key: str, tensor: torch.Tensor, into: torch.Tensor) -> None:
    try:
        values = tensor.detach() if is_plain(tensor) else plain_cpu(tensor)
    except CheckpointingException as exc:
        raise ShardingError(f"tensor {key!r}: {exc}") from exc
    into.copy_(values, non_blocking=True)


__all__ = ["Copies", "Layout"]

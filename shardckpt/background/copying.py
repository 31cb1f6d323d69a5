"""Copy tensors into one staging buffer with several threads: large ones and runs in pieces, small ones in batches."""

from __future__ import annotations

import ctypes
import re
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from shardckpt import settings
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.planning import make_column, repeat_values
from shardckpt.storage import Workers
from shardckpt.tensors import (
    LARGE,
    PAGE,
    copy_each,
    find_addresses,
    has_values_on_host,
    have_values_on_host,
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
#: Bytes. Small tensors that lie side by side, at least so many together, are copied at once, as their memory.
_RUN = 256 << 10
#: Most elements of a small tensor: to copy more, torch would start threads of its own.
_FEW = 32768
#: Small tensors that a thread copies at a time.
_BATCH = 256

#: Dtypes whose tensors are copied as bytes, not by torch: it cannot copy integers narrower than a byte, normalizes
#: bools to 0 and 1, and keeps the scales of quantized dtypes elsewhere.
_BY_BYTES = re.compile(r"torch\.(bool|bit|u?int[1-7]|qu?int.*)")
_Move = tuple[int, int, int]  # target address, source address, number of bytes
_Run = tuple[int, int, int]  # number of the first tensor, its address, number of bytes


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a buffer.

    Numbers are in arrays, which are pickled and compared faster than lists.

    Attributes:
        offsets: Where each tensor begins, in bytes.
        ends: Where each ends.
        counts: Elements of each.
        dtypes: The dtype of each.
        shapes: The shape of each.
        small: Numbers of the tensors that torch copies fast together, if their values are in the host's memory.
        large: Numbers of the others.
        nbytes: Size of the buffer, in bytes.
    """

    offsets: array[int]
    ends: array[int]
    counts: array[int]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    small: array[int]
    large: array[int]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Return a layout for copies of the tensors, one after the other.

        The copy of a large tensor has the same address modulo the page size as the tensor: files are laid
        out so that a direct write can take a tensor from such an address, without another copy.
        """
        counts, dtypes = _measure(tensors)
        copied = {dtype for dtype in set(dtypes) if not _BY_BYTES.fullmatch(str(dtype))}
        offsets, ends, small, large = array("q"), array("q"), array("q"), array("q")
        end = 0
        for number, (tensor, count, dtype) in enumerate(zip(tensors, counts, dtypes, strict=True)):
            (small if count <= _FEW and dtype in copied else large).append(number)
            nbytes = count * dtype.itemsize
            if nbytes >= _LARGE:
                end += (page_offset(tensor) - end) % PAGE
            offsets.append(end)
            ends.append(end + nbytes)
            end += -(-nbytes // _ALIGNED) * _ALIGNED
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal shapes are one tuple, which is pickled once
        shapes = [known.setdefault(shape, shape) for shape in (tuple(tensor.shape) for tensor in tensors)]
        return cls(offsets, ends, counts, dtypes, shapes, small, large, end)

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
        counts, dtypes = _measure(tensors)
        if counts != self.layout.counts or dtypes != self.layout.dtypes:
            self._refuse(counts)
        small: Sequence[int] = self.layout.small
        large: Sequence[int] = self.layout.large
        self._runs: list[_Run] = []
        # First asked of all: a loop over many small tensors takes a third of the time that it takes to copy them.
        some = [tensors[n] for n in small]
        if (addresses := find_addresses(some)) is not None:
            self._runs, small = _find_runs(self.layout, addresses)
        elif not have_values_on_host(some):
            large = sorted([*large, *(n for n in small if not has_values_on_host(tensors[n]))])
            small = sorted({*range(len(tensors))}.difference(large))
        self._small = small
        self._rows = [n for n in large if is_ordinary(tensors[n])]
        self._others = [n for n in large if not is_ordinary(tensors[n])]

    def _refuse(self, counts: Sequence[int]) -> NoReturn:
        """Raise for the first tensor that is not what the layout has."""
        found = zip(counts, (tensor.dtype for tensor in self._tensors), strict=True)
        planned = zip(self.layout.counts, self.layout.dtypes, strict=True)
        key, one, other = next(
            (key, one, other) for key, one, other in zip(self._keys, found, planned, strict=True) if one != other
        )
        raise ShardingError(f"tensor {key!r}: {one[0]} of {one[1]}, not {other[0]} of {other[1]}")

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
        """Yield functions that copy runs and large contiguous tensors, about ``_PIECE`` bytes each."""
        moves: list[_Move] = []
        ahead = 0
        rows = ((n, self._tensors[n].data_ptr(), self.layout.ends[n] - self.layout.offsets[n]) for n in self._rows)
        for first, source, size in (*self._runs, *rows):
            target = views[first].data_ptr()
            for start in range(0, size, _PIECE):
                nbytes = min(_PIECE, size - start)
                moves.append((target + start, source + start, nbytes))
                ahead += nbytes
                if ahead >= _PIECE:
                    yield partial(_move, moves)
                    moves, ahead = [], 0
        yield partial(_move, moves)

    def _batches(self, views: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
        """Yield functions that copy the other small tensors, ``_BATCH`` each."""
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


def _measure(tensors: Sequence[torch.Tensor]) -> tuple[array[int], list[torch.dtype]]:
    """Return the number of elements and the dtype of each tensor."""
    return array("q", [tensor.numel() for tensor in tensors]), [tensor.dtype for tensor in tensors]


def _find_runs(layout: Layout, addresses: list[int]) -> tuple[list[_Run], list[int]]:
    """Find small tensors that lie side by side in memory as their copies do in the buffer.

    Args:
        layout: Has the small tensors.
        addresses: Where each of these is in memory; all are contiguous.

    Returns:
        Runs of at least ``_RUN`` bytes, and the numbers of the small tensors that are in none.
    """
    if not addresses:
        return [], []
    numbers, sources = torch.frombuffer(layout.small, dtype=torch.int64), make_column(addresses)
    starts, ends = (torch.frombuffer(places, dtype=torch.int64)[numbers] for places in (layout.offsets, layout.ends))
    shifts = sources - starts
    # A run has the bytes between its tensors, too. They can be read: less than 64, they are in the page of the last
    # byte before them or of the first behind them.
    is_first = torch.ones_like(numbers, dtype=torch.bool)
    is_first[1:] = (shifts[1:] != shifts[:-1]) | (starts[1:] - ends[:-1] >= _ALIGNED)
    first = is_first.nonzero().view(-1)
    behind = torch.cat([first[1:], make_column([len(numbers)])])
    sizes = ends[behind - 1] - starts[first]
    is_run = sizes >= _RUN
    rest = numbers[~repeat_values(is_run, behind - first)]
    chosen = (column[is_run].tolist() for column in (numbers[first], sources[first], sizes))
    return list(zip(*chosen, strict=True)), rest.tolist()


def _move(moves: Sequence[_Move]) -> None:
    for target, source, nbytes in moves:
        ctypes.memmove(target, source, nbytes)  # ctypes releases the GIL: other threads copy meanwhile


def _copy(key: str, tensor: torch.Tensor, into: torch.Tensor) -> None:
    try:
        values = tensor.detach() if is_plain(tensor) else plain_cpu(tensor)
    except CheckpointingException as exc:
        raise ShardingError(f"tensor {key!r}: {exc}") from exc
    into.copy_(values, non_blocking=True)

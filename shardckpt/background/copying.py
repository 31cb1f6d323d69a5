"""Copy tensors into one staging buffer with several threads: large ones and runs in pieces, small ones in batches."""

from __future__ import annotations

import ctypes
import re
from array import array
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import compress, groupby
from operator import attrgetter, ne, or_, sub
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt import settings
from shardckpt.distributed.pickling import SharedPickle, pickle_value
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.storage.workers import Workers
from shardckpt.tensors.memory import (
    LARGE,
    PAGE,
    are_contiguous,
    has_values_on_host,
    is_ordinary,
    is_plain,
    page_offset,
    plain_cpu,
    read_addresses,
    synchronize_devices,
)
from shardckpt.tensors.torch_private import copy_each
from shardckpt.tensors.wrappers import movable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Tensors begin at multiples of this, in bytes, as in torch's allocator: enough for the largest elements.
ALIGNED = 64
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
#: So many tensors that follow each other in the buffer and have one form are worth joining.
_FEWEST_JOINED = 8

#: Dtypes whose tensors are copied as bytes, not by torch: it cannot copy integers narrower than a byte, normalizes
#: bools to 0 and 1, and keeps the scales of quantized dtypes elsewhere.
_BY_BYTES = re.compile(r"torch\.(bool|bit|u?int[1-7]|qu?int.*)")
_Move = tuple[int, int, int]  # target address, source address, number of bytes
_Run = tuple[int, int, int]  # number of the first tensor, its address, number of bytes; a large tensor is one, too


@dataclass(frozen=True)
class Layout:
    """The places of tensors in a buffer.

    Numbers are in arrays, which are pickled and compared faster than lists.

    Attributes:
        offsets: Where each tensor begins, in bytes.
        ends: Where each ends.
        counts: Elements of each.
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

    # The properties below are computed once a layout, which nearly all saves of a job have in common.

    @cached_property
    def small_starts(self) -> list[int]:
        """The offset of each small tensor."""
        return [self.offsets[number] for number in self.small]

    @cached_property
    def small_ends(self) -> list[int]:
        """The offset where each small tensor ends."""
        return [self.ends[number] for number in self.small]

    @cached_property
    def widest(self) -> int:
        """The bytes that the largest small tensor takes, with the padding after it."""
        sizes = (end - start for start, end in zip(self.small_starts, self.small_ends, strict=True))
        return max(ALIGNED, -(-max(sizes, default=0) // ALIGNED) * ALIGNED)

    @cached_property
    def small_gaps(self) -> list[bool]:
        """For each small tensor but the first, whether large ones lie between it and the small one before it."""
        return [start - end >= ALIGNED for start, end in zip(self.small_starts[1:], self.small_ends, strict=False)]

    @cached_property
    def batches(self) -> list[Sequence[int]]:
        """The numbers of the small tensors, a batch each; a range, if the batch can be copied as one tensor."""
        found: list[Sequence[int]] = []
        rest: list[int] = []
        for joint, pairs in groupby(enumerate(self.small), lambda pair: self._find_joint(*pair)):
            numbers = [number for _, number in pairs]
            if joint is None or len(numbers) < _FEWEST_JOINED:
                rest += numbers
                continue
            found += _cut(range(numbers[0], numbers[-1] + 1))
        return found + _cut(rest)

    def _find_joint(self, place: int, number: int) -> tuple[Any, ...] | None:
        """Return a key, equal for small tensors that torch can join into their copies; None if it cannot."""
        shape, dtype, nbytes = self.shapes[number], self.dtypes[number], self.ends[number] - self.offsets[number]
        if not shape or not nbytes or nbytes % ALIGNED or not dtype.is_floating_point or dtype.itemsize == 1:
            return None
        return shape, dtype, number - place, self.offsets[number] - nbytes * place

    @cached_property
    def run_finder(self) -> RunFinder:
        """Finds the runs among the small tensors."""
        return RunFinder(self)

    @cached_property
    def _pickle(self) -> SharedPickle:
        return SharedPickle(pickle_value([getattr(self, each.name) for each in fields(self)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_layout, (self._pickle,)

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
            end += -(-nbytes // ALIGNED) * ALIGNED
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


def _unpickle_layout(pickle: SharedPickle) -> Layout:
    return Layout(*pickle.unpickle())


class Copies:
    """A plan to copy tensors, which sorts them by the way they are copied.

    Args:
        keys: Those of the tensors, for errors.
        tensors: On any device, of any strides, quantized ones included.
        layout: The layout of an earlier copy of tensors with the same dtypes and shapes, to be reused.
    """

    def __init__(self, keys: Sequence[str], tensors: Sequence[torch.Tensor], layout: Layout | None = None) -> None:
        self.layout = Layout.of(tensors) if layout is None else layout
        self._keys = keys
        self._tensors = tensors
        self._facts = _read_facts(
            tensors, addresses=len(self.layout.small) == len(tensors), contiguous=self.layout.run_finder.has_found
        )
        on_host = self._facts.on_host
        self._on_devices = [] if all(on_host) else [tensors[n] for n, is_cpu in enumerate(on_host) if not is_cpu]
        self.uses_cuda = any(tensor.device.type == "cuda" for tensor in self._on_devices)

    def run(self, views: Sequence[torch.Tensor]) -> None:
        """Copy the tensors into :meth:`Layout.views` of a buffer, which is pinned if any tensor is on a CUDA device.

        It is a ShardingError if a tensor has no memory of its own that holds its values, or does not fit the layout.
        """
        self._check()
        large: list[_Run] = []
        try:
            for number in self.layout.large:  # first the devices' copies: they run while threads copy the host's memory
                tensor = self._tensors[number]
                if is_ordinary(tensor):
                    large.append((number, tensor.data_ptr(), tensor.nbytes))
                else:
                    _copy(self._keys[number], tensor, views[number])
            # a list: threads that wait for the next job while this one looks at tensors would be slower than one alone
            jobs = [*self._copy_small(views), *_moves(large, views)]
            if self.layout.nbytes < LARGE:
                for job in jobs:
                    job()
            else:
                Workers(settings.io_threads(), "shardckpt-stage").each(lambda job: job(), enumerate(jobs))
        finally:  # after an error too: a copy in flight would overwrite what the next save stages here
            synchronize_devices(self._on_devices)

    def _copy_small(self, views: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
        small = self.layout.small
        is_all = len(small) == len(self._tensors)
        tensors = self._tensors if is_all else [self._tensors[n] for n in small]
        runs: list[_Run] = []
        batches: Sequence[Sequence[int]] = self.layout.batches
        addresses = self._facts.addresses if is_all else None if self._on_devices else read_addresses(tensors)
        if not self._on_devices and addresses is not None:
            found, others = self.layout.run_finder.find(addresses)
            if found and self._are_contiguous(tensors):
                runs, batches = found, _cut(others)
        else:
            rest = [number for number in small if has_values_on_host(self._tensors[number])]
            for number in sorted(set(small).difference(rest)):
                _copy(self._keys[number], self._tensors[number], views[number])
            batches = _cut(rest)
        yield from _moves(runs, views)
        for batch in batches:
            yield partial(self._copy_joined if isinstance(batch, range) else self._copy_batch, batch, views)

    def _are_contiguous(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the small tensors are; they are asked if that was not foreseen: few saves have runs."""
        known = self._facts.are_contiguous
        return are_contiguous(tensors, self._facts.dtypes) if known is None else known

    def _check(self) -> None:
        """Raise for the first tensor that differs from the layout."""
        counts, dtypes = self._facts.counts, self._facts.dtypes
        if counts == self.layout.counts and dtypes == self.layout.dtypes:
            return
        rows = zip(self._keys, self.layout.counts, self.layout.dtypes, counts, dtypes, strict=True)
        key, *planned, count, dtype = next(row for row in rows if row[1:3] != row[3:])
        raise ShardingError(f"tensor {key!r}: {count} of {dtype}, not {planned[0]} of {planned[1]}")

    def _copy_joined(self, batch: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        """Copy tensors of one shape and dtype, whose copies lie side by side: as one tensor that is joined from them.

        torch prepares a copy once for all of them, not for each.
        """
        first, tensors = views[batch[0]], [self._tensors[n] for n in batch]
        # All have as many elements as their copies. Where the first has the shape of its copy, torch refuses to join
        # others to it that have not.
        if tensors[0].shape == first.shape:
            shape = (len(batch) * first.shape[0], *first.shape[1:])
            with suppress(RuntimeError), torch.inference_mode():
                torch.cat(tensors, out=first.as_strided(shape, first.stride()))
                return
        self._copy_batch(batch, views)  # which copies or refuses each

    def _copy_batch(self, batch: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        try:
            copy_each([views[n] for n in batch], [self._tensors[n] for n in batch])
        except RuntimeError:
            for number in batch:  # one by one, so that the error names the tensor
                _copy(self._keys[number], self._tensors[number], views[number])
            raise


class _Facts(NamedTuple):
    """The properties of all tensors that a copy asks for.

    Attributes:
        counts: The number of elements of each.
        on_host: Whether each is on the CPU.
        addresses: Where each begins; None if one has no address, or none was asked for.
        are_contiguous: Whether all are, which only those with addresses are asked; None if they were not.
    """

    counts: array[int]
    dtypes: list[torch.dtype]
    on_host: list[bool]
    addresses: list[int] | None
    are_contiguous: bool | None


def _read_facts(tensors: Sequence[torch.Tensor], *, addresses: bool, contiguous: bool) -> _Facts:
    """Read all properties of a batch, then of the next: the processor's cache has a batch until its last question."""
    counts, dtypes, on_host = array("q"), list[torch.dtype](), list[bool]()
    starts: list[int] | None = [] if addresses else None
    are_all_contiguous = True
    for start in range(0, len(tensors), _BATCH):
        batch = tensors[start : start + _BATCH]
        batch_counts, batch_dtypes = _measure(batch)
        are_on_host = list(map(attrgetter("is_cpu"), batch))
        counts.extend(batch_counts)
        dtypes.extend(batch_dtypes)
        on_host.extend(are_on_host)
        batch_starts = read_addresses(batch) if starts is not None and all(are_on_host) else None
        if starts is None or batch_starts is None:
            starts = None
            continue
        starts += batch_starts
        if contiguous and are_all_contiguous:
            are_all_contiguous = are_contiguous(batch, batch_dtypes)
    return _Facts(counts, dtypes, on_host, starts, are_all_contiguous if contiguous and starts is not None else None)


def _measure(tensors: Sequence[torch.Tensor]) -> tuple[array[int], list[torch.dtype]]:
    """Return the number of elements and the dtype of each tensor."""
    return array("q", [tensor.numel() for tensor in tensors]), [tensor.dtype for tensor in tensors]


def _cut(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[start : start + _BATCH] for start in range(0, len(numbers), _BATCH)]


class RunFinder:
    """Finds small tensors that lie side by side in memory as their copies do in the buffer.

    Save after save: the next tensors nearly always have the addresses of the last.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._addresses: list[int] = []
        self._found: tuple[list[_Run], Sequence[int]] = [], []

    @property
    def has_found(self) -> bool:
        """Whether the last tensors had runs."""
        return bool(self._found[0])

    def find(self, addresses: list[int]) -> tuple[list[_Run], Sequence[int]]:
        """Return runs of at least ``_RUN`` bytes, and the numbers of the small tensors that are in none.

        ``addresses`` is where each of the small tensors begins in memory. The runs hold if the tensors are contiguous.
        """
        if addresses != self._addresses:
            self._addresses, self._found = addresses, self._search(addresses)
        return self._found

    def _search(self, addresses: list[int]) -> tuple[list[_Run], Sequence[int]]:
        numbers, starts, ends = self._layout.small, self._layout.small_starts, self._layout.small_ends
        # Nearly always there are none. A run has so many tensors that every few pairs of neighbours one shows it.
        step = max(1, _RUN // self._layout.widest - 1)
        pairs = range(1, len(numbers), step)
        if pairs and not any(addresses[n] - addresses[n - 1] == starts[n] - starts[n - 1] for n in pairs):
            return [], numbers
        # Lists, and no torch: on tensors of this size it may wake threads of its own, which takes longer than all of
        # this.
        shifts = list(map(sub, addresses, starts))
        # A run has the bytes between its tensors, too. They can be read: less than 64, they are in the page of the last
        # byte before them or of the first behind them.
        is_first = map(or_, map(ne, shifts[1:], shifts), self._layout.small_gaps)
        first = [0, *compress(range(1, len(shifts)), is_first)]
        behind = [*first[1:], len(shifts)]
        runs: list[_Run] = []
        rest: list[int] = []
        kept = 0  # behind the last run
        for begin, end in zip(first, behind, strict=True):
            nbytes = ends[end - 1] - starts[begin]
            if nbytes >= _RUN:
                runs.append((numbers[begin], addresses[begin], nbytes))
                rest += numbers[kept:begin]
                kept = end
        return (runs, rest + list(numbers[kept:])) if runs else ([], numbers)


def _moves(runs: Sequence[_Run], views: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Yield functions that copy memory, about ``_PIECE`` bytes each."""
    moves: list[_Move] = []
    ahead = 0
    for first, source, size in runs:
        target = views[first].data_ptr()
        for start in range(0, size, _PIECE):
            nbytes = min(_PIECE, size - start)
            moves.append((target + start, source + start, nbytes))
            ahead += nbytes
            if ahead >= _PIECE:
                yield partial(_move, moves)
                moves, ahead = [], 0
    yield partial(_move, moves)


def _move(moves: Sequence[_Move]) -> None:
    for target, source, nbytes in moves:
        ctypes.memmove(target, source, nbytes)  # ctypes releases the GIL: other threads copy meanwhile


def _copy(key: str, tensor: torch.Tensor, into: torch.Tensor) -> None:
    try:
        values = tensor.detach() if is_plain(tensor) else plain_cpu(tensor)
    except CheckpointingException as exc:
        raise ShardingError(f"tensor {key!r}: {exc}") from exc
    movable(into).copy_(movable(values), non_blocking=True)

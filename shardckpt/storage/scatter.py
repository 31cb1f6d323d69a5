"""Reading a box of a stored row-major tensor into a tensor of any strides, dtype and device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from shardckpt.planning import Box, cut_flat_range, intersect
from shardckpt.storage.spans import Elements
from shardckpt.tensors import copy_values, is_plain, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardckpt.planning import Ints
    from shardckpt.storage.reader import Take

#: Fewer bytes than this are read, not left out, where they lie between wanted ones: a request costs as much.
_GAP = 64 << 10


class Source(Protocol):
    """What is read from: a :class:`shardckpt.storage.reader.CheckpointReader`, or what stands for one."""

    def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fill memory from a range."""

    def read_pieces(
        self,
        name: str,
        elements: Elements,
        ranges: Iterable[tuple[int, int]],
        take: Take,
        what: str,
        *,
        pinned: bool = False,
    ) -> None:
        """Read ranges piece by piece."""


class StoredArray(NamedTuple):
    """A row-major tensor in a file.

    Attributes:
        file: Its name.
        offset: Of the first element, in bytes.
        dtype: The tensor's dtype.
        shape: Its shape.
    """

    file: str
    offset: int
    dtype: torch.dtype
    shape: Ints


def read_box(source: Source, stored: StoredArray, start: Ints, target: torch.Tensor, what: str) -> None:
    """Read the box of the target's shape that begins at ``start``, casting to the target's dtype.

    Elements that follow each other in the file and in the target's memory are read right there; others go through
    small buffers.

    Args:
        source: Reads the file.
        stored: The tensor.
        start: An index of it.
        target: Filled in place.
        what: A key, named in errors.
    """
    wanted = Box(start, tuple(target.shape))
    volume = wanted.volume
    if not volume:
        return
    ranges = _ranges(stored, wanted)
    first, itemsize = next(ranges), stored.dtype.itemsize
    if first[1] - first[0] == volume * itemsize and _takes_bytes(target, stored.dtype):
        source.read_into(stored.file, first[0], tensor_bytes(target), what)
        return
    elements = Elements(stored.offset, stored.offset + math.prod(stored.shape) * itemsize, itemsize)
    scatter, pinned = _Scatter(stored, wanted, target), target.device.type == "cuda"
    source.read_pieces(stored.file, elements, chain((first,), ranges), scatter, what, pinned=pinned)


@dataclass(frozen=True)
class _Scatter:
    """Puts elements of a stored tensor to where a target has them."""

    stored: StoredArray
    wanted: Box
    target: torch.Tensor

    def __call__(self, position: int, memory: memoryview) -> Callable[[], None] | None:
        """Copy those of the elements that are wanted.

        Args:
            position: Offset of the first element in the file.
            memory: The elements.
        """
        if not memory.nbytes:
            return None
        values = torch.frombuffer(memory, dtype=torch.uint8).view(self.stored.dtype)
        later = self.target.device.type == "cuda"  # which is waited for; other devices' copies are not
        first = (position - self.stored.offset) // self.stored.dtype.itemsize
        for box, begin in cut_flat_range(self.stored.shape, first, first + values.numel()):
            common = intersect(box, self.wanted)
            if common is not None:
                part = values[begin : begin + box.volume].view(box.shape)
                copy_values(_part(self.target, common, self.wanted), _part(part, common, box), non_blocking=later)
        return _waiter(self.target.device)


def _takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether elements as a file has them can be read into the target's memory."""
    return target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous() and is_plain(target)


def _part(tensor: torch.Tensor, inner: Box, outer: Box) -> torch.Tensor:
    """A box of a tensor that holds another."""
    for axis, cut in enumerate(inner.within(outer)):
        if inner.shape[axis] != outer.shape[axis]:
            tensor = tensor.narrow(axis, cut.start, cut.stop - cut.start)
    return tensor


def _waiter(device: torch.device) -> Callable[[], None] | None:
    """Waits until a CUDA device has the copies that this thread has begun; other devices have them at once."""
    if device.type != "cuda":
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize  # type: ignore[no-any-return]


def _ranges(stored: StoredArray, wanted: Box) -> Iterator[tuple[int, int]]:
    """(start, stop) in the file of what a box spans, without the gaps that are worth it, in file order."""
    step = span = stored.dtype.itemsize
    base, outer = stored.offset, list[range]()
    for size, first, length in zip(*map(reversed, (stored.shape, *wanted)), strict=True):
        if not outer and step - span < _GAP:
            span += (length - 1) * step
        else:
            outer.append(range(0, length * step, step))
        base += first * step
        step *= size
    for steps in product(*reversed(outer)):
        start = base + sum(steps)
        yield start, start + span


__all__ = ["Source", "StoredArray", "read_box"]

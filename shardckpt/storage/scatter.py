"""Read a box of a stored row-major tensor into a tensor of any strides, dtype and device."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from shardckpt.planning.boxes import Box, cut_flat_range, intersect
from shardckpt.storage.spans import ElementRange, Pieces
from shardckpt.tensors.memory import is_ordinary, is_plain, tensor_bytes
from shardckpt.tensors.wrappers import copy_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.planning.boxes import Ints
    from shardckpt.storage.reader import Take

#: Bytes. A smaller gap between requested bytes is read, too: another request costs as much.
_GAP = 64 << 10


class Source(Protocol):
    """Reads ranges of files: a :class:`CheckpointReader`, or an object with these two of its methods."""

    def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fill memory from a range."""

    def read_pieces(self, pieces: Pieces, take: Take) -> None:
        """Read ranges in pieces, and give each to a function."""


class StoredArray(NamedTuple):
    """A row-major tensor in a file.

    Attributes:
        file: The file's name.
        offset: Of the first element in the file, in bytes; any, aligned or not.
        dtype: The tensor's dtype.
        shape: The tensor's shape.
    """

    file: str
    offset: int
    dtype: torch.dtype
    shape: Ints


def read_box(source: Source, stored: StoredArray, start: Ints, target: torch.Tensor, what: str) -> None:
    """Read the box of the target's shape that begins at ``start``, and cast it to the target's dtype.

    If the box is contiguous in the file and in the target's CPU memory, with equal dtypes, the bytes are read into the
    target without a copy; else they go through small buffers, pinned ones for a CUDA device.

    Args:
        source: Reads the file.
        stored: The tensor in the file.
        start: Index of the box's first element, one number for each axis.
        target: Filled in place; any strides, dtype and device.
        what: A name for the box in errors: a key.
    """
    if not target.numel():
        return
    offset = find_range(stored, start, target)
    if offset is not None:
        source.read_into(stored.file, offset, tensor_bytes(target), what)
        return
    requested, itemsize = Box(start, tuple(target.shape)), stored.dtype.itemsize
    ranges = _ranges(stored, requested)
    elements = ElementRange(stored.offset, stored.offset + math.prod(stored.shape) * itemsize, itemsize)
    scatter, pinned = partial(_scatter, stored, requested, target), target.device.type == "cuda"
    source.read_pieces(Pieces(stored.file, elements, ranges, what, pinned), scatter)


def find_range(stored: StoredArray, start: Ints, target: torch.Tensor) -> int | None:
    """Return where a box lies in the file, if its bytes are one range there, and the target takes them as they are.

    ``start`` is the index of the box's first element, the result the offset of the first byte; None if the bytes must
    be copied or converted.
    """
    if not _takes_bytes(target, stored.dtype):
        return None
    offset, step, is_run = 0, stored.dtype.itemsize, False  # from the last axis to the first, full axes before others
    for size, first, length in zip(reversed(stored.shape), reversed(start), reversed(target.shape), strict=True):
        if is_run and length != 1:
            return None
        is_run = is_run or length != size
        offset += first * step
        step *= size
    return stored.offset + offset


def _scatter(
    stored: StoredArray, requested: Box, target: torch.Tensor, position: int, memory: memoryview
) -> Callable[[], None] | None:
    """Copy the elements at an offset of the file that are in the requested box to their places in the target.

    Returns a function that waits until a CUDA device has copied them; None for other devices.
    """
    if not memory.nbytes:
        return None
    values = torch.frombuffer(memory, dtype=torch.uint8).view(stored.dtype)
    later = target.device.type == "cuda"  # only for CUDA the returned function waits for the copy
    first = (position - stored.offset) // stored.dtype.itemsize
    for box, begin in cut_flat_range(stored.shape, first, first + values.numel()):
        common = intersect(box, requested)
        if common is not None:
            part = values[begin : begin + box.volume].view(box.shape)
            copy_values(_part(target, common, requested), _part(part, common, box), non_blocking=later)
    return _waiter(target.device)


def _takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the bytes of a file can be read into the target's memory without conversion."""
    if target.dtype != dtype:
        return False
    # most targets are ordinary; the second question is for subclasses
    return is_ordinary(target) or (target.device.type == "cpu" and target.is_contiguous() and is_plain(target))


def _part(tensor: torch.Tensor, inner: Box, outer: Box) -> torch.Tensor:
    """Return the view of the box ``inner`` of a tensor that holds the box ``outer``."""
    for axis, cut in enumerate(inner.within(outer)):
        if inner.shape[axis] != outer.shape[axis]:
            tensor = tensor.narrow(axis, cut.start, cut.stop - cut.start)
    return tensor


def _waiter(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits until a CUDA device has done the copies of this thread; None for other devices."""
    if device.type != "cuda":
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize  # type: ignore[no-any-return]


def _ranges(stored: StoredArray, requested: Box) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) offsets of a box in the file, in file order; small gaps are included."""
    step = span = stored.dtype.itemsize
    base, outer = stored.offset, list[range]()
    # from the last axis to the first: elements that are contiguous, but for small gaps, become one range
    for size, first, length in zip(*map(reversed, (stored.shape, *requested)), strict=True):
        if not outer and step - span < _GAP:
            span += (length - 1) * step
        else:
            outer.append(range(0, length * step, step))
        base += first * step
        step *= size
    for steps in product(*reversed(outer)):
        start = base + sum(steps)
        yield start, start + span

"""Boxes: where a shard lies in its global tensor, as offset and extent along every axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.tensors.wrappers import check_destination, dequantize, is_quantized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from shardckpt.mapping.sharded_tensor import ShardedTensor

#: A shape or an offset: one number per axis.
Ints = tuple[int, ...]


class Box(NamedTuple):
    """A box of elements of a global tensor: an index range along every axis.

    Attributes:
        offset: The first index along every axis.
        shape: The number of indices along every axis.
    """

    offset: Ints
    shape: Ints

    @classmethod
    def from_shape(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for the box of a 0-D tensor."""
        return math.prod(self.shape)

    @property
    def end(self) -> Ints:
        """The first index behind the box, along every axis."""
        return tuple(off + size for off, size in zip(self.offset, self.shape, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape has such a box; the box may be of untrusted numbers."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            off >= 0 and size >= 0 and off + size <= most
            for off, size, most in zip(self.offset, self.shape, shape, strict=True)
        )

    def moved(self, by: Sequence[int]) -> Box:
        """Return the same box with ``by`` added to its offset."""
        return Box(tuple(off + step for off, step in zip(self.offset, by, strict=True)), self.shape)

    def offset_in(self, outer: Box) -> Ints:
        """Return where this box begins in a tensor that holds the elements of the outer box."""
        return tuple(off - base for off, base in zip(self.offset, outer.offset, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box in a tensor that holds the elements of the outer box."""
        starts = self.offset_in(outer)
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


class FlatPart(NamedTuple):
    """A box of a flattened shard, and the index in the flattened slice at which its elements start."""

    box: Box
    start: int


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box of the elements that both boxes have, or None if there are none."""
    start = tuple(map(max, a.offset, b.offset))
    end = tuple(map(min, a.end, b.end))
    if any(lo >= hi for lo, hi in zip(start, end, strict=True)):
        return None
    return Box(start, tuple(hi - lo for lo, hi in zip(start, end, strict=True)))


def cut_flat_range(shape: Sequence[int], start: int, stop: int) -> list[FlatPart]:
    """Cut elements ``start`` to before ``stop`` of a row-major flattened block into at most 2·axes - 1 boxes.

    They are in the order of their elements. The elements of each follow each other in the flattened slice, in the box's
    own row-major order; its ``start`` counts from the slice's first element.
    """
    found, position = [], 0
    for box in _flat_boxes(tuple(shape), start, stop):
        found.append(FlatPart(box, position))
        position += box.volume
    return found


def _flat_boxes(shape: Ints, start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _in_row(shape, first, start, stop, row)
    # a range of elements is: the end of a row, complete rows, the beginning of a row; each may be absent
    head = start // row + bool(start % row)  # the first complete row
    tail = stop // row  # behind the last complete row
    boxes = _in_row(shape, first, start, head * row, row) if head > first else []
    if tail > head:
        boxes.append(Box((head, *(0,) * (len(shape) - 1)), (tail - head, *shape[1:])))
    return boxes + (_in_row(shape, last, tail * row, stop, row) if stop > tail * row else [])


def _in_row(shape: Ints, index: int, start: int, stop: int, row: int) -> list[Box]:
    inner = _flat_boxes(shape[1:], start - index * row, stop - index * row)
    return [Box((index, *box.offset), (1, *box.shape)) for box in inner]


def unflattened_box(shard: ShardedTensor) -> Box:
    """Return the box of a shard in its global tensor, or of the block that a flattened shard is a part of."""
    extent = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return Box(tuple(shard.global_offset), extent)


def shard_parts(shard: ShardedTensor) -> list[FlatPart]:
    """Return the boxes that a shard fills in its global tensor: one, or several for a flattened shard.

    Example:
        Copy a shard into a full tensor that has its global shape::

            for part in shard_parts(shard):
                full[part.box.within(Box.from_shape(full.shape))] = part_view(shard, part)
    """
    lead = shard.prepend_axis_num
    block = unflattened_box(shard)
    part = shard.flattened_range
    if part is None or not block.volume:  # a part of an empty block is the block
        return [FlatPart(block, 0)]
    return [
        FlatPart(Box((0,) * lead + box.offset, (1,) * lead + box.shape).moved(block.offset), start)
        for box, start in cut_flat_range(shard.local_shape, part.start, part.stop)
    ]


def with_memory(shard: ShardedTensor) -> ShardedTensor:
    """Return a shard with a plain tensor to fill: its own, or a new one on the CPU.

    It is a ShardingError if its own is quantized, and no values can be quantized into it.
    """
    if is_quantized(shard.data):
        check_destination(shard.key, shard.data)
    # no part of a quantized wrapper can be filled on its own: a plain tensor is returned in its place
    if shard.data is None or is_quantized(shard.data):
        shard = shard.without_data()
        shard.init_data("cpu")
    return shard


def part_view(shard: ShardedTensor, part: FlatPart) -> torch.Tensor:
    """Return the shard's elements of one of its :func:`shard_parts`.

    Args:
        shard: With data.
        part: One of its parts.

    Returns:
        A tensor of the shape of the part's box: a view of ``shard.data``, detached, so that it can be written also
        where that requires grad; or of its dequantized values if that is quantized and has another shape.

    Raises:
        ValueError: the shard has no data.
    """
    if shard.data is None:
        raise ValueError(f"ShardedTensor {shard.key!r} has no data")
    data = shard.data.detach()
    if shard.flattened_range is None and not shard.prepend_axis_num:
        return data
    if is_quantized(data):
        data = dequantize(data)
    if shard.flattened_range is not None:
        return data[part.start : part.start + part.box.volume].view(part.box.shape)
    return data.view(part.box.shape) if data.is_contiguous() else data[(None,) * shard.prepend_axis_num]


def cut_box(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Cut a box of a tensor along its first axes into boxes of at most ``most`` bytes, in the order of their elements.

    An element may have more.
    """
    nbytes = box.volume * itemsize
    if nbytes <= most:
        yield box
        return
    axis = next((axis for axis, size in enumerate(box.shape) if size > 1), None)
    if axis is None:
        yield box
        return
    length = box.shape[axis]
    step = max(1, most // (nbytes // length))
    for start in range(0, length, step):
        offset = _replace_at(box.offset, axis, box.offset[axis] + start)
        shape = _replace_at(box.shape, axis, min(step, length - start))
        yield from cut_box(Box(offset, shape), itemsize, most)


def _replace_at(values: Ints, axis: int, value: int) -> Ints:
    return (*values[:axis], value, *values[axis + 1 :])

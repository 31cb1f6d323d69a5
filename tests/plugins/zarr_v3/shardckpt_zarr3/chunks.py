"""Which chunks an array has, and whether each of them is one rank's to write."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.planning import Box, Ints

#: So many chunks, which are files, a box may be cut into before the main rank writes the tensor instead.
MAX_CHUNKS_PER_BOX = 4


def choose_chunks(shape: Ints, boxes: Collection[Box]) -> Ints | None:
    """Return a chunk shape for which no chunk has elements of two boxes; None if that takes too many chunks.

    Zarr's chunks have one shape. Along each axis it is the greatest common divisor of the places where boxes begin or
    end; the last chunk may reach beyond the array. Boxes of equal sizes, and those of ``torch.chunk``, are one chunk
    each.

    Args:
        shape: Shape of the array.
        boxes: The boxes that have elements; together they are the array.
    """
    ends = [{end for box in boxes for end in (box.offset[axis], box.end[axis])} for axis in range(len(shape))]
    steps = [math.gcd(*(places - {size})) or size for size, places in zip(shape, ends, strict=True)]
    chunks = tuple(max(step, 1) for step in steps)
    count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    return chunks if count <= MAX_CHUNKS_PER_BOX * len(boxes) else None

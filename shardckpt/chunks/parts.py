"""Match the parts of one shard with the stored boxes of its tensor, box by box."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning.boxes import shard_parts
from shardckpt.planning.coverage import find_hole, find_overlap
from shardckpt.planning.lookup import BoxFinder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mapping.sharded_tensor import ShardedTensor
    from shardckpt.planning.boxes import Box, FlatPart


def make_finder(key: str, boxes: Sequence[Box]) -> BoxFinder:
    """Return a finder of the stored boxes of a tensor, which numbers them in their order.

    If they overlap, it is a CorruptCheckpointError.
    """
    overlap = find_overlap(boxes)
    if overlap is not None:
        raise CorruptCheckpointError(f"{key!r}: its stored chunks overlap in {overlap.common}")
    return BoxFinder(boxes)


def match_parts(shard: ShardedTensor, finder: BoxFinder) -> dict[FlatPart, list[tuple[int, Box]]]:
    """Return the stored boxes that have elements of each part of a shard: numbers, each with the box of the elements.

    An element that is not stored is a CorruptCheckpointError, unless the shard has ``allow_shape_mismatch``.
    """
    found = {part: list(finder.touching(part.box)) if part.box.volume else [] for part in shard_parts(shard)}
    if not shard.allow_shape_mismatch:
        for part, touched in found.items():
            if [common for _, common in touched] != [part.box]:
                _check_no_hole(shard.key, part.box, [common for _, common in touched])
    return found


def _check_no_hole(key: str, requested: Box, found: list[Box]) -> None:
    back = tuple(-step for step in requested.offset)
    hole = find_hole(requested.shape, [box.moved(back) for box in found])
    if hole is not None:
        raise CorruptCheckpointError(
            f"{key!r}: the checkpoint does not hold its elements {hole.moved(requested.offset)}: the save lost them"
        )

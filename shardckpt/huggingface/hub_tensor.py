"""Tensors of a Hugging Face folder that is to be written, and where a checkpoint stores their elements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine.streaming import make_memory
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.boxes import Box, cut_box, intersect
from shardckpt.plugins.key_mapping import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.planning.boxes import Ints
    from shardckpt.plugins.key_mapping import KeyMapEntry


class StoredPart(NamedTuple):
    """A part of a stored tensor, of this global shape, that goes into a tensor of the folder.

    ``link`` is the key map entry: which elements, and where they are in the folder's tensor.
    """

    key: str
    shape: Ints
    link: KeyMapEntry


#: Bytes of a tensor that are compared at a time.
_COMPARED_BYTES = 8 << 20


class HubTensor(NamedTuple):
    """A tensor that is to be written to the folder.

    Attributes:
        dtype: The dtype in which it is written.
        parts: The parts of stored tensors that make it up; none if its values are in memory.
    """

    name: str
    dtype: torch.dtype
    shape: Ints
    parts: tuple[StoredPart, ...] = ()

    @property
    def nbytes(self) -> int:
        """Its size in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shards_for(self, box: Box, values: torch.Tensor) -> Iterator[ShardedTensor]:
        """Yield the shards of stored tensors that make up a box; their data are views of ``values``, of its shape."""
        for part in self.parts:
            common = intersect(box, part.link.folder_box)
            if common is None:
                continue
            target = values[common.within(box)]
            if part.link.transposed:
                target = target.transpose(-1, -2)
            offset = part.link.to_stored(common).offset
            lead, shape = part.link.dropped, tuple(target.shape)
            yield ShardedTensor(part.key, target, target.dtype, shape, part.shape, offset, None, prepend_axis_num=lead)


def describe_stored(name: str, dtype: torch.dtype, shape: Ints) -> HubTensor:
    """Return a tensor that is stored as a whole, under its own name."""
    parts = (StoredPart(name, shape, link) for link in Identity().links(name, shape))
    return HubTensor(name, dtype, shape, tuple(parts))


def read_hub_boxes(boxes: Sequence[tuple[HubTensor, Box]], checkpoint: OpenCheckpoint) -> list[torch.Tensor]:
    """Return the values of boxes of tensors that are to be written; they are read together."""
    values = [make_memory(tensor.dtype, box.shape) for tensor, box in boxes]
    both = zip(boxes, values, strict=True)
    checkpoint.values([part for (tensor, box), value in both for part in tensor.shards_for(box, value)])
    return values


def have_equal_values(one: HubTensor, other: HubTensor, checkpoint: OpenCheckpoint) -> bool:
    """Return whether two tensors have one shape and, as the checkpoint stores them, the same values."""
    if one.shape != other.shape:
        return False
    for box in cut_box(Box.from_shape(one.shape), one.dtype.itemsize, _COMPARED_BYTES):
        first_values, other_values = read_hub_boxes([(one, box), (other._replace(dtype=one.dtype), box)], checkpoint)
        if not first_values.equal(other_values):
            return False
    return True

"""Tensors of a Hugging Face folder that is to be written, and where a checkpoint stores their elements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Box, intersect

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardckpt.planning import Ints
    from shardckpt.plugins import KeyMapEntry


class StoredPart(NamedTuple):
    """A part of a stored tensor that goes into a tensor of the folder.

    Attributes:
        key: The stored tensor's key.
        shape: Its global shape.
        link: The key map entry: which elements, and where they are in the folder's tensor.
    """

    key: str
    shape: Ints
    link: KeyMapEntry


class HubTensor(NamedTuple):
    """A tensor that is to be written to the folder.

    Attributes:
        name: Its name.
        dtype: The dtype in which it is written.
        shape: Its shape.
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

    @property
    def full_box(self) -> Box:
        """The box of all its elements."""
        return Box((0,) * len(self.shape), self.shape)

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

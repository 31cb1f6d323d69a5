"""A tensor of a Hugging Face folder that is to be written, and where its elements are in a checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Box, intersect

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardckpt.planning import Ints
    from shardckpt.plugins import Link


class Part(NamedTuple):
    """Elements of a stored tensor.

    Attributes:
        key: Its key.
        shape: Its global shape.
        link: Which elements, and where they are in the folder's tensor.
    """

    key: str
    shape: Ints
    link: Link


class HubTensor(NamedTuple):
    """A tensor of the folder.

    Attributes:
        name: Its name.
        dtype: The dtype in which it is written.
        shape: Its shape.
        parts: Where its elements are stored.
    """

    name: str
    dtype: torch.dtype
    shape: Ints
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are written of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        """All of its elements."""
        return Box((0,) * len(self.shape), self.shape)

    def wanted(self, box: Box, values: torch.Tensor) -> Iterator[ShardedTensor]:
        """What to load so that ``values`` are the elements of a box of the tensor.

        Args:
            box: Elements of the tensor.
            values: Of the box's shape; filled by the load.
        """
        for part in self.parts:
            common = intersect(box, part.link.hub_box)
            if common is None:
                continue
            target = values[common.within(box)]
            if part.link.transposed:
                target = target.transpose(-1, -2)
            offset = part.link.to_stored(common).offset
            lead, shape = part.link.dropped, tuple(target.shape)
            yield ShardedTensor(part.key, target, target.dtype, shape, part.shape, offset, None, prepend_axis_num=lead)


__all__ = ["HubTensor", "Part"]

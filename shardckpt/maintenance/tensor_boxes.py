"""Cut the tensors of a conversion into boxes of bounded size, and read each box when it is needed."""

from __future__ import annotations

import threading
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine.streaming import make_memory
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface.hub_tensor import read_hub_boxes
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.planning.boxes import Box, cut_box
from shardckpt.tensors.deferred import DeferredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.engine.tensor_sums import TensorSums
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.mapping.sharded_tensor import BlockScales

#: Bytes of small boxes that are read together: each read costs a plan.
_BATCH_BYTES = 8 << 20


class TensorBox(NamedTuple):
    """A box of a tensor of the target."""

    tensor: HubTensor
    box: Box

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.box.volume * self.tensor.dtype.itemsize

    def describe(self, data: torch.Tensor, scales: BlockScales | None = None) -> ShardedTensor:
        """Return the box as a shard of its tensor."""
        tensor, box = self
        grid = (1,) * len(box.shape) if box.shape == tensor.shape else None
        return ShardedTensor(
            *(tensor.name, data, tensor.dtype, box.shape, tensor.shape, box.offset, grid), block_scales=scales
        )


def cut_tensors(tensors: Sequence[HubTensor], most: int) -> list[TensorBox]:
    """Cut tensors into boxes of at most ``most`` bytes each, in order."""
    return [
        TensorBox(tensor, box)
        for tensor in tensors
        for box in cut_box(Box.from_shape(tensor.shape), tensor.dtype.itemsize, most)
    ]


def sum_written(stored: OpenCheckpoint, boxes: Sequence[TensorBox], sums: TensorSums) -> None:
    """Read boxes of the target, and add up the fingerprints of the source's tensors from which they were made."""
    for batch in batch_by_bytes(boxes, attrgetter("nbytes"), _BATCH_BYTES):
        _sum_batch(stored, batch, sums)


def _sum_batch(stored: OpenCheckpoint, batch: Sequence[TensorBox], sums: TensorSums) -> None:
    # a function of its own: the memory of one batch is free before the next one is read
    wanted: list[ShardedBase] = [box.describe(make_memory(box.tensor.dtype, box.box.shape)) for box in batch]
    values = stored.values(wanted)
    pairs = zip(batch, values, strict=True)
    sources = [shard for box, value in pairs for shard in box.tensor.shards_for(box.box, value)]
    sums.add(sources, [shard.data for shard in sources])  # type: ignore[misc]


class DeferredBoxes:
    """The boxes of a target's tensors as shards, each read when a writer takes its bytes; any thread may do so.

    While they are asked for in order, small boxes are read together. The last read is kept until the next.

    Args:
        stored: The source.
        boxes: The boxes.
        most: The most bytes of a box; the small boxes that are read together have no more.
        scales: The block scales of each tensor, by its name.

    Attributes:
        shards: A shard for each box, in order.
    """

    def __init__(
        self, stored: OpenCheckpoint, boxes: Sequence[TensorBox], most: int, scales: Mapping[str, BlockScales | None]
    ) -> None:
        self._stored = stored
        self._boxes = boxes
        self._batch_bytes = min(most, _BATCH_BYTES)
        self._lock = threading.Lock()
        #: The last read: the values of consecutive boxes, and the number of the first.
        self._values: list[torch.Tensor] = []
        self._first = 0
        self.shards = [
            box.describe(
                DeferredTensor(box.box.shape, box.tensor.dtype, partial(self._read, number)),
                scales.get(box.tensor.name),
            )
            for number, box in enumerate(boxes)
        ]

    def _read(self, number: int) -> torch.Tensor:
        with self._lock:
            end = self._first + len(self._values)
            if not self._first <= number < end:
                self._values = []  # before the read: both would be in memory
                # out of order, the following boxes may not be requested next
                stop = len(self._boxes) if number == end else number + 1
                following = (self._boxes[n] for n in range(number, stop))
                batch = next(batch_by_bytes(following, attrgetter("nbytes"), self._batch_bytes))
                self._values, self._first = self._read_batch(batch), number
            return self._values[number - self._first]

    def _read_batch(self, batch: Sequence[TensorBox]) -> list[torch.Tensor]:
        try:
            return read_hub_boxes(batch, self._stored)
        except CheckpointingException:
            if len(batch) == 1:
                raise
        return self._read_batch(batch[:1])  # a box that cannot be read fails when it is asked for, under its own key

"""Reading the tensors of an open checkpoint in boxes of bounded size, and summing their bits. Not collective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.engine.tensor_sums import TensorSums
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.planning.boxes import Box, cut_box
from shardckpt.planning.shard_copies import shard_nbytes
from shardckpt.storage.buffers import Buffer
from shardckpt.tensors.memory import LARGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.mapping.base import ShardedBase

#: Bytes of values that are read at a time: enough for fast reads, and little compared to the process at rest.
STREAM_BYTES = 32 << 20


class TensorBox(NamedTuple):
    """A box of a stored tensor."""

    tensor: ShardedTensor
    box: Box

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.box.volume * self.tensor.dtype.itemsize


def read_boxes(checkpoint: OpenCheckpoint, boxes: Sequence[TensorBox]) -> list[torch.Tensor]:
    """Return the values of boxes, as CPU tensors of the stored dtypes."""
    wanted: list[ShardedBase] = [make_destination(_describe(*found)) for found in boxes]
    return checkpoint.values(wanted)


def compute_fingerprints(
    checkpoint: OpenCheckpoint, tensors: Sequence[ShardedTensor], most: int = STREAM_BYTES
) -> dict[str, str]:
    """Return the fingerprints of stored tensors, as :func:`shardckpt.fingerprint` returns them, from their values.

    All of these are read; ``most`` is the bytes of them in memory at a time.
    """
    sums = TensorSums()
    for batch in batch_by_bytes(cut_stored(tensors, most), lambda found: found.nbytes, most):
        values = read_boxes(checkpoint, batch)
        sums.add([_describe(*found) for found in batch], values)
        del values  # before the next read: both would be in memory
    return {
        tensor.key: sums.finish(tensor.key, tensor.dtype, tuple(tensor.global_shape))
        for tensor in sorted(tensors, key=lambda tensor: tensor.key)
    }


def cut_stored(tensors: Iterable[ShardedTensor], most: int) -> Iterator[TensorBox]:
    """Yield boxes of stored tensors, of at most ``most`` bytes each, in order."""
    for tensor in tensors:
        for box in cut_box(Box.from_shape(tensor.global_shape), tensor.dtype.itemsize, most):
            yield TensorBox(tensor, box)


def make_destination(shard: ShardedTensor) -> ShardedTensor:
    """Return a description to read into; a large one has memory of :func:`make_memory`, others have none yet."""
    wanted = shard.without_data()
    if shard_nbytes(shard) >= LARGE:
        wanted.data = make_memory(shard.dtype, shard.local_shape)
    return wanted


def make_memory(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor to read into; a large one's memory goes back to the system as soon as it is freed."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # of torch's allocator, freed blocks of varying sizes kept up to 140 MiB of a budget of 64
    return torch.frombuffer(Buffer(nbytes).view, dtype=torch.uint8).view(dtype).view(shape)


def _describe(tensor: ShardedTensor, box: Box) -> ShardedTensor:
    return ShardedTensor(tensor.key, None, tensor.dtype, box.shape, tensor.global_shape, box.offset, None)

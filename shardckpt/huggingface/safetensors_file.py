"""Produce the bytes of a safetensors file block by block from a checkpoint."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch

from shardckpt.huggingface.header import lay_out
from shardckpt.planning import cut_flat_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.huggingface.header import TensorSpan
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.mapping import ShardedTensor


class SafetensorsFile:
    """The content of a file that is to be written.

    Args:
        tensors: The tensors of the file.
        load: Fills the data of shards from the checkpoint.
    """

    def __init__(self, tensors: Sequence[HubTensor], load: Callable[[list[ShardedTensor]], None]) -> None:
        self._layout = lay_out(tensors, {})
        self._stops = [span.stop for span in self._layout.tensors]
        self._load = load
        #: Bytes of the file.
        self.size = self._layout.size

    def fill(self, offset: int, memory: memoryview) -> None:
        """Fill memory with the file's bytes from an offset on.

        Args:
            offset: Offset in the file, in bytes: a multiple of 8, so that no element is cut.
            memory: The memory to fill.
        """
        head = self._layout.head[offset : offset + memory.nbytes]
        memory[: len(head)] = head
        # the shards' data are views of the block: the load writes to it without a copy
        block = torch.frombuffer(memory, dtype=torch.uint8)
        self._load([shard for span in self._overlapping(offset, memory) for shard in _shards_in(span, offset, block)])

    def _overlapping(self, offset: int, memory: memoryview) -> Iterator[TensorSpan[HubTensor]]:
        """Yield the tensors that have bytes in the block."""
        end = offset + memory.nbytes
        for number in range(bisect_right(self._stops, offset), len(self._stops)):
            span = self._layout.tensors[number]
            if span.start >= end:
                return
            if span.start < span.stop:
                yield span


def _shards_in(span: TensorSpan[HubTensor], offset: int, block: torch.Tensor) -> Iterator[ShardedTensor]:
    """Describe what to load for the bytes of a tensor that are in a block."""
    tensor, start, stop = span
    low, high = max(start, offset), min(stop, offset + len(block))
    values = block[low - offset : high - offset].view(tensor.dtype)
    first = (low - start) // tensor.dtype.itemsize
    for box, at in cut_flat_range(tensor.shape, first, first + len(values)):
        yield from tensor.shards_for(box, values[at : at + box.volume].view(box.shape))


__all__ = ["SafetensorsFile"]

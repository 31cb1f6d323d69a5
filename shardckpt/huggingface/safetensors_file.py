"""The content of a safetensors file, block by block, from what a checkpoint stores."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch

from shardckpt.huggingface.header import lay_out
from shardckpt.planning import cut_flat_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.huggingface.header import Placed
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.mapping import ShardedTensor


class SafetensorsFile:
    """A file that is to be written.

    Args:
        tensors: What it holds.
        load: Fills the data of shards from the checkpoint.
    """

    def __init__(self, tensors: Sequence[HubTensor], load: Callable[[list[ShardedTensor]], None]) -> None:
        self._layout = lay_out(tensors, {})
        self._stops = [placed.stop for placed in self._layout.placed]
        self._load = load
        #: Bytes of the file.
        self.size = self._layout.size

    def fill(self, offset: int, memory: memoryview) -> None:
        """Fill memory with what the file has from an offset on, which is a multiple of 8."""
        head = self._layout.head[offset : offset + memory.nbytes]
        memory[: len(head)] = head
        block = torch.frombuffer(memory, dtype=torch.uint8)
        self._load([shard for placed in self._touched(offset, memory) for shard in _wanted(placed, offset, block)])

    def _touched(self, offset: int, memory: memoryview) -> Iterator[Placed[HubTensor]]:
        """The tensors that have bytes in the block."""
        end = offset + memory.nbytes
        for number in range(bisect_right(self._stops, offset), len(self._stops)):
            placed = self._layout.placed[number]
            if placed.start >= end:
                return
            if placed.start < placed.stop:
                yield placed


def _wanted(placed: Placed[HubTensor], offset: int, block: torch.Tensor) -> Iterator[ShardedTensor]:
    """What to load for the bytes of a tensor that are in a block."""
    tensor, start, stop = placed
    low, high = max(start, offset), min(stop, offset + len(block))
    values = block[low - offset : high - offset].view(tensor.dtype)
    first = (low - start) // tensor.dtype.itemsize
    for box, at in cut_flat_range(tensor.shape, first, first + len(values)):
        yield from tensor.wanted(box, values[at : at + box.volume].view(box.shape))


__all__ = ["SafetensorsFile"]

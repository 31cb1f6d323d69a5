"""Write safetensors files from a checkpoint block by block: the next block is loaded while others go to the disk."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardckpt.huggingface.header import lay_out
from shardckpt.planning import cut_flat_range
from shardckpt.storage import BufferPool, FileStream, NewFile, WriterPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from shardckpt.huggingface.header import FileLayout, TensorSpan
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.mapping import ShardedTensor
    from shardckpt.storage import Buffer

#: Bytes that are loaded at a time: a multiple of 8, so that no element is cut.
BLOCK_BYTES = 8 << 20
#: Threads that write. There is one more block than threads: it is filled meanwhile.
_THREADS = 2


class SafetensorsWriter:
    """Writes files one after the other through the same few blocks of memory; a context manager.

    Args:
        load: Fills the data of shards from the checkpoint; called by the thread that calls :meth:`write`.
    """

    def __init__(self, load: Callable[[list[ShardedTensor]], None]) -> None:
        self._load = load
        self._pool = WriterPool(_THREADS)
        self._blocks = BufferPool(BLOCK_BYTES)

    def write(self, path: Path, tensors: Sequence[HubTensor]) -> None:
        """Write tensors to a new file, durable when this returns."""
        layout = lay_out(tensors, {})
        file = NewFile(path, layout.size)
        stream = FileStream(file, self._pool, algorithm=None)
        try:
            for offset in range(0, layout.size, BLOCK_BYTES):
                if stream.error is not None:
                    break  # finish() raises it
                self._pool.records.acquire()
                block = self._blocks.acquire()
                memory = block.view[: layout.size - offset]
                try:
                    self._fill(layout, offset, memory)
                except BaseException:
                    self._release(block)
                    raise
                stream.put([memory], partial(self._release, block))
            stream.finish()
        finally:
            stream.stop()
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    def _release(self, block: Buffer) -> None:
        self._blocks.release(block)
        self._pool.records.release()

    def _fill(self, layout: FileLayout, offset: int, memory: memoryview) -> None:
        """Fill memory with the file's bytes from an offset on."""
        head = layout.head[offset : offset + memory.nbytes]
        memory[: len(head)] = head
        # the shards' data are views of the block: the load writes to it without a copy
        block = torch.frombuffer(memory, dtype=torch.uint8)
        first = bisect_right(layout.tensors, offset, key=lambda span: span.stop)
        shards: list[ShardedTensor] = []
        for span in layout.tensors[first:]:
            if span.start >= offset + memory.nbytes:
                break
            shards += _shards_in(span, offset, block)
        self._load(shards)


def _shards_in(span: TensorSpan, offset: int, block: torch.Tensor) -> Iterator[ShardedTensor]:
    """Describe what to load for the bytes of a tensor that are in a block."""
    tensor, start, stop = span
    low, high = max(start, offset), min(stop, offset + len(block))
    values = block[low - offset : high - offset].view(tensor.dtype)
    first = (low - start) // tensor.dtype.itemsize
    for box, at in cut_flat_range(tensor.shape, first, first + len(values)):
        yield from tensor.shards_for(box, values[at : at + box.volume].view(box.shape))

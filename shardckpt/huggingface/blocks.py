"""Write files of tensors from a checkpoint block by block: the next block is loaded while others go to the disk."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardckpt.planning.boxes import cut_flat_range
from shardckpt.storage.buffers import BufferPool
from shardckpt.storage.memory_budget import LEAST_WRITING
from shardckpt.storage.resumable import ResumableWriter
from shardckpt.storage.writer import CheckpointWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.huggingface.header import FileLayout, TensorSpan
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.mapping.sharded_tensor import ShardedTensor
    from shardckpt.storage.journal import Journal
    from shardckpt.storage.store_abilities import StreamsWrites

#: Bytes that are loaded at a time: a multiple of every element's size, so that no element is cut.
BLOCK_BYTES = 8 << 20
#: Bytes of the blocks of a file on a disk: the two threads that the least budget allows write one each, one is filled.
WRITER_BYTES: int = 3 * BLOCK_BYTES


def open_writer(
    folder: Path,
    journal: Journal | None = None,
    store: StreamsWrites | None = None,
    memory_budget: int | None = LEAST_WRITING,
) -> CheckpointWriter:
    """Return a writer of files of tensors in a folder of this machine, or on a store; a journal lets others go on."""
    kind = CheckpointWriter if journal is None else partial(ResumableWriter, journal)
    return kind(folder, 0, store=store, memory_budget=memory_budget)


def write_blocks(writer: CheckpointWriter, name: str, layout: FileLayout, checkpoint: OpenCheckpoint) -> None:
    """Write a new file, durable when this returns; this thread reads the values of the tensors."""
    file = writer.create(name, layout.size)
    file.describe(partial(_digest, layout))
    pool = BufferPool(BLOCK_BYTES)
    for offset in range(0, layout.size, BLOCK_BYTES):
        block = _Block(layout, offset, checkpoint, pool)
        file.append(block.nbytes, block.fill, keys=0, what=block.name, release=block.release)
    writer.finish(file)


class _Block:
    """Some bytes of a file, in memory of a pool from :meth:`fill` to :meth:`release`."""

    def __init__(self, layout: FileLayout, offset: int, checkpoint: OpenCheckpoint, pool: BufferPool) -> None:
        self._layout = layout
        self._offset = offset
        self._checkpoint = checkpoint
        self._pool = pool
        self._first = bisect_right(layout.tensors, offset, key=lambda span: span.stop)
        self.nbytes = min(BLOCK_BYTES, layout.size - offset)

    @property
    def name(self) -> str:
        """The name of the first tensor that has bytes in the block."""
        spans = self._layout.tensors
        return spans[self._first].tensor.name if self._first < len(spans) else ""

    def fill(self) -> list[memoryview]:
        """Load the bytes."""
        self._buffer = self._pool.acquire()
        memory = self._buffer.view[: self.nbytes]
        stop = self._offset + self.nbytes
        frame = self._layout.frame
        for part in frame[bisect_right(frame, self._offset, key=lambda part: part.stop) :]:
            if part.start >= stop:
                break
            low, high = max(part.start, self._offset), min(part.stop, stop)
            memory[low - self._offset : high - self._offset] = part.data[low - part.start : high - part.start]
        # the shards' data are views of the block: the load writes to it without a copy
        values = torch.frombuffer(memory, dtype=torch.uint8)
        shards: list[ShardedBase] = []
        for span in self._layout.tensors[self._first :]:
            if span.start >= stop:
                break
            shards += _shards_in(span, self._offset, values)
        if shards:
            self._checkpoint.values(shards)
        return [memory]

    def release(self) -> None:
        """Give the memory back: all bytes are written, or the file has failed."""
        self._pool.release(self._buffer)


def _digest(layout: FileLayout) -> str:
    """Return a digest of the content of the file except the values of tensors."""
    digest = hashlib.blake2b(repr([layout.size, *layout.tensors]).encode(), digest_size=16)
    for start, data in layout.frame:
        digest.update(start.to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _shards_in(span: TensorSpan, offset: int, block: torch.Tensor) -> Iterator[ShardedTensor]:
    """Describe the shards to load for the bytes of a tensor that are in a block."""
    tensor, start, stop = span
    low, high = max(start, offset), min(stop, offset + len(block))
    values = block[low - offset : high - offset].view(tensor.dtype)
    first = (low - start) // tensor.dtype.itemsize
    for box, at in cut_flat_range(tensor.shape, first, first + len(values)):
        yield from tensor.shards_for(box, values[at : at + box.volume].view(box.shape))

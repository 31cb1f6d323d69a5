"""Write files of tensors from a checkpoint block by block: the next block is loaded while others go to the disk."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.planning import cut_flat_range
from shardckpt.storage import NOTE_BYTES, BufferPool, FileProgress, FileStream, NewFile, WriterPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from shardckpt.huggingface.header import FileLayout, TensorSpan
    from shardckpt.mapping import ShardedTensor
    from shardckpt.storage import Buffer, Journal

#: Bytes that are loaded at a time: a multiple of 8, so that no element is cut.
BLOCK_BYTES = 8 << 20
#: Threads that write. There is one more block than threads: it is filled meanwhile.
_THREADS = 2
#: Bytes that a BlockWriter holds.
WRITER_BYTES = (_THREADS + 1) * BLOCK_BYTES


class BlockWriter:
    """Writes files one after the other through the same few blocks of memory; a context manager.

    Args:
        load: Fills the data of shards from the checkpoint; called by the thread that calls :meth:`write`.
        journal: The journal of what is written, if another process may go on with it after a kill.
    """

    def __init__(self, load: Callable[[list[ShardedTensor]], Any], journal: Journal | None = None) -> None:
        self._journal = journal
        self._load = load
        self._pool = WriterPool(_THREADS)
        self._blocks = BufferPool(BLOCK_BYTES)

    def write(self, path: Path, layout: FileLayout) -> None:
        """Write a new file, durable when this returns."""
        digest = "" if self._journal is None else _digest(layout)
        begin = noted = 0 if self._journal is None else _find_written(path, digest, self._journal)
        file = NewFile(path, layout.size, shared=begin > 0)
        stream = FileStream(file, self._pool, algorithm=None)
        if begin:
            stream.resume([begin], [0], b"")
        try:
            for offset in range(begin, layout.size, BLOCK_BYTES):
                if offset - noted >= NOTE_BYTES and self._journal is not None:
                    stream.drain()
                    noted = offset
                    self._journal.note(path.name, FileProgress(offset, 0, digest, [], []))
                if stream.error is not None:
                    break  # finish() raises it
                self._pool.records.acquire()
                block = self._blocks.acquire()
                memory = block.view[: layout.size - offset]
                try:
                    fill_block(layout, offset, memory, self._load)
                except BaseException:
                    self._release(block)
                    raise
                stream.put([memory], partial(self._release, block))
            stream.finish()
            if self._journal is not None:
                self._journal.note(path.name, FileProgress(layout.size, 0, digest, [], []))
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


def fill_block(layout: FileLayout, offset: int, memory: memoryview, load: Callable[[list[ShardedTensor]], Any]) -> None:
    """Fill memory with a file's bytes.

    Args:
        layout: Of the file.
        offset: Of the first byte in the file, at the start of an element.
        memory: Filled completely.
        load: Fills the data of shards from the checkpoint.
    """
    stop = offset + memory.nbytes
    first = bisect_right(layout.frame, offset, key=lambda part: part.start + len(part.data))
    for start, data in layout.frame[first:]:
        if start >= stop:
            break
        low, high = max(start, offset), min(start + len(data), stop)
        memory[low - offset : high - offset] = data[low - start : high - start]
    # the shards' data are views of the block: the load writes to it without a copy
    block = torch.frombuffer(memory, dtype=torch.uint8)
    first = bisect_right(layout.tensors, offset, key=lambda span: span.stop)
    shards: list[ShardedTensor] = []
    for span in layout.tensors[first:]:
        if span.start >= stop:
            break
        shards += _shards_in(span, offset, block)
    load(shards)


def _find_written(path: Path, digest: str, journal: Journal) -> int:
    """Return how many bytes of the file an earlier process has written."""
    found = journal.files.get(path.name)
    if found is None:
        return 0
    if found.digest != digest:
        raise journal.diverge(path)
    return found.position


def _digest(layout: FileLayout) -> str:
    """Return a digest of what the file has beside the values of tensors."""
    digest = hashlib.blake2b(repr([layout.size, *layout.tensors]).encode(), digest_size=16)
    for start, data in layout.frame:
        digest.update(start.to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _shards_in(span: TensorSpan, offset: int, block: torch.Tensor) -> Iterator[ShardedTensor]:
    """Describe what to load for the bytes of a tensor that are in a block."""
    tensor, start, stop = span
    low, high = max(start, offset), min(stop, offset + len(block))
    values = block[low - offset : high - offset].view(tensor.dtype)
    first = (low - start) // tensor.dtype.itemsize
    for box, at in cut_flat_range(tensor.shape, first, first + len(values)):
        yield from tensor.shards_for(box, values[at : at + box.volume].view(box.shape))

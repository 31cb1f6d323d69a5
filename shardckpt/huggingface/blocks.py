"""New files written block by block: the next one is filled while those before it go to the disk."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardckpt.storage import BufferPool, FileStream, NewFile, WriterPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from shardckpt.storage import Buffer

#: Bytes that are filled at a time.
BLOCK_BYTES = 8 << 20
#: Threads that write. There is one more block than threads: it is filled meanwhile.
_THREADS = 2


class BlockWriter:
    """Writes files one after the other through the same few blocks of memory; a context manager."""

    def __init__(self) -> None:
        self._pool = WriterPool(_THREADS)
        self._blocks = BufferPool(BLOCK_BYTES)

    def write(self, path: Path, size: int, fill: Callable[[int, memoryview], None]) -> None:
        """A new file of ``size`` bytes, durable when this returns.

        Args:
            path: The file.
            size: Its bytes.
            fill: ``fill(offset, memory)`` fills the memory with what the file has from the offset on; called by this
                thread, from front to back.
        """
        file = NewFile(path, size)
        stream = FileStream(file, self._pool, algorithm=None)
        try:
            for offset in range(0, size, BLOCK_BYTES):
                if stream.error is not None:
                    break  # finish() raises it
                self._pool.records.acquire()
                block = self._blocks.acquire()
                memory = block.view[: size - offset]
                try:
                    fill(offset, memory)
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


__all__ = ["BLOCK_BYTES", "BlockWriter"]

"""New files written block by block: the next one is filled while those before it go to the disk."""

from __future__ import annotations

import mmap
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardckpt.storage import NewFile
from shardckpt.tensors import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

#: Bytes that are filled at a time.
BLOCK_BYTES = 8 << 20
_BLOCKS = 3


class BlockWriter:
    """Writes files one after the other through the same few blocks of memory; a context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_BLOCKS - 1, "shardckpt-export")
        self._free = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(_BLOCKS)]
        self._writes: deque[tuple[Future[None], mmap.mmap]] = deque()

    def write(self, path: Path, size: int, fill: Callable[[int, memoryview], None]) -> None:
        """A new file of ``size`` bytes, durable when this returns.

        Args:
            path: The file.
            size: Its bytes.
            fill: ``fill(offset, memory)`` fills the memory with what the file has from the offset on; called by this
                thread, from front to back.
        """
        file = NewFile(path)
        try:
            file.reserve(size)
            for offset in range(0, size, BLOCK_BYTES):
                block = self._block()
                memory = memoryview(block)[: min(BLOCK_BYTES, size - offset)]
                fill(offset, memory)
                self._writes.append((self._pool.submit(_write, file, memory, offset), block))
            self._wait()
            file.finish(size)
        finally:
            self._settle()
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def _block(self) -> mmap.mmap:
        """A block that nothing is written from any more."""
        if not self._free:
            self._wait(1)
        return self._free.pop()

    def _wait(self, count: int | None = None) -> None:
        """Wait for the oldest writes, by default for all; raises what one of them has failed with."""
        for _ in range(len(self._writes) if count is None else count):
            write, block = self._writes.popleft()
            self._free.append(block)
            write.result()

    def _settle(self) -> None:
        """Wait for what is left of a file that failed."""
        while self._writes:
            write, block = self._writes.popleft()
            write.exception()
            self._free.append(block)


def _write(file: NewFile, memory: memoryview, offset: int) -> None:
    whole = memory.nbytes // PAGE * PAGE
    file.write_pages(memory[:whole], offset)
    file.write(memory[whole:], offset + whole)


__all__ = ["BLOCK_BYTES", "BlockWriter"]

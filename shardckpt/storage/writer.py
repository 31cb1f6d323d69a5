"""Writing a checkpoint's files: each created once, digested from memory while it is written, fsynced when closed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import StorageError
from shardckpt.manifest import FileRecord
from shardckpt.storage.digest import Segments, segment_record
from shardckpt.storage.filesystem import check_file_name, naming, open_new, write_all

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

#: Smaller records are handled by the calling thread: handing them over costs more than writing them.
WORTH_A_THREAD = 256 << 10

Produce = Callable[[], Sequence[memoryview]]
_Task = Future[list[tuple[int, int]]]


class FileWriter:
    """One new file, written as a sequence of records; a context manager that closes and fsyncs it.

    Records are placed when they are appended and written by a pool of threads; their bytes are asked for only then,
    so that copies from a device exist for as many records as there are threads. Where the file's SHA-256 is wanted,
    its records go through a thread of its own, one by one: it hashes a record while the pool writes it.

    Args:
        path: The file, which must not exist.
        pool: The file threads, if there are any.
        sha256: Whether to hash the file.
    """

    def __init__(self, path: Path, pool: ThreadPoolExecutor | None, *, sha256: bool = False) -> None:
        self._path = path
        self._pool = pool
        self._fd = open_new(path)
        #: SHA-256 of the records that are written, where it is wanted.
        self.sha256 = hashlib.sha256() if sha256 else None
        self._lane = ThreadPoolExecutor(1, "shardckpt-sha256") if sha256 and pool is not None else None
        self._tasks: list[_Task] = []
        self._keys = 0
        self._error: BaseException | None = None
        #: Offset of the next record, in bytes.
        self.position = 0

    def append(self, nbytes: int, produce: Produce, keys: int = 1) -> int:
        """Place a record of ``nbytes`` bytes and return its offset.

        Args:
            nbytes: Size of the record.
            produce: Gives its parts, ``nbytes`` bytes together; called once, in any thread.
            keys: How many stored items the record is, for reports.

        Raises:
            Exception: what an earlier record failed with; the file can no longer be completed.
        """
        self._raise_error()
        offset, self.position = self.position, self.position + nbytes
        self._keys += keys
        self._tasks.append(_submitted(self._thread_for(nbytes), lambda: self._write(offset, nbytes, produce)))
        return offset

    def close(self) -> FileRecord:
        """Wait for all records, fsync, and return the file's record without its rank (0)."""
        try:
            segments: list[tuple[int, int]] = []
            for task in self._tasks:
                self._raise_error()
                segments += task.result()
            with naming("fsync", self._path):
                os.fsync(self._fd)
        finally:
            self._stop()
        table = Segments([length for length, _ in segments], [digest for _, digest in segments])
        return FileRecord(
            name=self._path.name,
            size=self.position,
            rank=0,
            keys=self._keys,
            digest=table.root(),
            segments=table.pack(),
        )

    def _thread_for(self, nbytes: int) -> ThreadPoolExecutor | None:
        """Who writes the next record: with a SHA-256 nobody before all records that come before it are hashed."""
        large = nbytes >= WORTH_A_THREAD
        if self._lane is None:
            return self._pool if large else None
        waiting = bool(self._tasks) and not self._tasks[-1].done()
        return self._lane if large or waiting else None

    def _stop(self) -> None:
        """Let no thread use the descriptor any more, and close it."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            if not task.cancelled():
                task.exception()
        self._tasks = []
        if self._lane is not None:
            self._lane.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, offset: int, nbytes: int, produce: Produce) -> list[tuple[int, int]]:
        try:
            return self._written(offset, nbytes, produce)
        except BaseException as exc:
            self._error = self._error or exc
            raise

    def _written(self, offset: int, nbytes: int, produce: Produce) -> list[tuple[int, int]]:
        parts = [part.cast("B") for part in produce()]
        total = sum(part.nbytes for part in parts)
        if total != nbytes:
            raise StorageError(
                f"{self._path}: a record at offset {offset} was announced with {nbytes} bytes, has {total}"
            )
        if self.sha256 is None:
            return self._stored(parts, offset)
        stored = _submitted(self._pool if nbytes >= WORTH_A_THREAD else None, lambda: self._stored(parts, offset))
        for part in parts:
            self.sha256.update(part)
        return stored.result()

    def _stored(self, parts: list[memoryview], offset: int) -> list[tuple[int, int]]:
        write_all(self._fd, self._path, parts, offset)
        return segment_record(parts)


class CheckpointWriter:
    """The files that one rank adds to a checkpoint in its staging directory.

    Args:
        directory: The staging directory.
        rank: Noted in every file's record.
        sha256: Whether to hash the files while they are written, for ``integrity.json``.
    """

    def __init__(self, directory: Path, rank: int, *, sha256: bool = False) -> None:
        self._directory = directory
        self._rank = rank
        self._sha256 = sha256
        threads = settings.io_threads()
        self._pool = ThreadPoolExecutor(threads, "shardckpt-write") if threads > 1 else None
        self._open: dict[str, FileWriter] = {}
        #: Records of the files that are complete.
        self.files: list[FileRecord] = []
        #: Their SHA-256 in hex, by name, where it is wanted.
        self.sha256: dict[str, str] = {}

    def create(self, name: str) -> FileWriter:
        """Begin a new file; names are of letters, digits, ``.``, ``_`` and ``-``."""
        writer = FileWriter(self._directory / check_file_name(name), self._pool, sha256=self._sha256)
        self._open[name] = writer
        return writer

    def finish(self, writer: FileWriter) -> FileRecord:
        """Complete a file: all its bytes are durable when this returns."""
        record = writer.close().model_copy(update={"rank": self._rank})
        del self._open[record.name]
        self.files.append(record)
        if writer.sha256 is not None:
            self.sha256[record.name] = writer.sha256.hexdigest()
        return record

    def write(self, name: str, data: bytes | memoryview, keys: int = 1) -> FileRecord:
        """A whole small file at once."""
        writer = self.create(name)
        view = memoryview(data)
        writer.append(view.nbytes, lambda: [view], keys=keys)
        return self.finish(writer)

    def close(self) -> None:
        """End the threads; files that were not finished stay incomplete."""
        for writer in self._open.values():
            writer._stop()  # noqa: SLF001 - the writer's own half of the same machinery
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _submitted(pool: ThreadPoolExecutor | None, task: Callable[[], list[tuple[int, int]]]) -> _Task:
    """The task's future: run by the pool, or here and now."""
    if pool is not None:
        return pool.submit(task)
    future: _Task = Future()
    try:
        future.set_result(task())
    except Exception as exc:  # noqa: BLE001 - it is raised by result()
        future.set_exception(exc)
    return future


__all__ = ["CheckpointWriter", "FileWriter", "Produce"]

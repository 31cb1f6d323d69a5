"""A file of a checkpoint under construction: a sequence of records, digested from memory while they are written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError
from shardckpt.storage.digest import SMALL_RECORD
from shardckpt.storage.new_file import NewFile
from shardckpt.storage.object_stream import ObjectStream
from shardckpt.storage.staged_files import make_record
from shardckpt.storage.stream import Countdown, FileStream, WriterPool, start

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest.models import FileRecord
    from shardckpt.storage.object_stream import SentObject
    from shardckpt.storage.store_abilities import StreamsWrites
    from shardckpt.storage.stream import ContentStream

Produce = Callable[[], Sequence[bytes | bytearray | memoryview]]


class FileWriter:
    """One new file, written as a sequence of records; :meth:`CheckpointWriter.create` makes it.

    The calling thread assigns each record its offset and calls ``produce``; the pool writes, and digests large records.
    ``produce`` waits while the pool has as many large records as it may hold, which bounds memory. If the file's
    SHA-256 is requested, a thread of this file does the caller's part and hashes: SHA-256 needs the bytes in order, and
    so several files are hashed in parallel. With a ``store`` it is an object: the calling thread digests and copies the
    records into parts, which the store's client sends; ``sent`` is one that the store has already.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        pool: WriterPool,
        algorithm: str,
        nbytes: int = 0,
        *,
        sha256: bool = False,
        exists: bool = False,
        store: StreamsWrites | None = None,
        part_bytes: int = 0,
        sent: SentObject | None = None,
    ) -> None:
        path = directory / name
        self._name = name
        self._path = path
        self._pool = pool
        self._file: NewFile | None = None
        self._stream: ContentStream
        if sent is not None:
            self._stream = sent
        elif store is None:
            self._file = NewFile(path, nbytes, shared=exists, count=pool.count)
            self._stream = FileStream(self._file, pool, algorithm)
        else:
            self._stream = ObjectStream(store, path, name, algorithm, part_bytes, pool.count)
        #: SHA-256 of the records so far, if it is requested.
        self.sha256 = hashlib.sha256() if sha256 else None
        self._lane = ThreadPoolExecutor(1, "shardckpt-sha256") if sha256 else None
        self._waiting: list[Future[None]] = []
        self._keys = 0
        #: Offset of the next record, in bytes.
        self.position = 0

    @property
    def sync_seconds(self) -> float:
        """Seconds that :meth:`close` waited for fsync."""
        return self._stream.sync_seconds

    def describe(self, content: Callable[[], str]) -> None:
        """Describe, before the first record, the content of the records beyond their sizes and names.

        Args:
            content: Returns a text, or a digest; called where another process may go on with the file. One of another
                text, which a killed process has left, is not continued.
        """

    def append(
        self,
        nbytes: int,
        produce: Produce,
        keys: int = 1,
        what: str = "",
        release: Callable[[], None] | None = None,
    ) -> int:
        """Append a record of ``nbytes`` bytes, right behind the one before: nothing is padded.

        Parts of 1 MiB and more are written fastest if their offset in the file and their address in memory are equal
        modulo 4096: then direct writes take the bytes from where they are, without a copy.

        Args:
            nbytes: Size of the record in bytes; 0 is a record, too.
            produce: Returns the record's parts, ``nbytes`` bytes together, which must not change until ``release`` is
                called, or :meth:`CheckpointWriter.finish` returns; called once, in any thread.
            keys: How many stored items the record holds, for reports.
            what: A name for the record in errors: a key.
            release: Called once after ``produce`` has returned, when the parts are written or have failed: their memory
                may be used again.

        Returns:
            The record's offset in the file, in bytes.

        Raises:
            Exception: The error of this or an earlier record; the file can no longer be completed.

        Example:
            >>> file = writer.create("weights.bin")  # doctest: +SKIP
            >>> offset = file.append(tensor.nbytes, lambda: [tensor_bytes(tensor)], what="layer.weight")
            >>> record = writer.finish(file)
        """
        offset = self._reserve_offset(nbytes, keys)
        if self._lane is None:
            self._put(offset, nbytes, produce, what, release)
        elif (waiting := start(self._lane, partial(self._put, offset, nbytes, produce, what, release))) is not None:
            self._waiting.append(waiting)
        return offset

    def append_small(self, parts: Iterable[bytes | memoryview], keys: int = 1, what: str = "") -> int:
        """Append a record whose parts are ready; they are copied before this returns.

        Faster than :meth:`append` for records of up to ``SMALL_RECORD`` bytes; larger ones are accepted, too.

        Args:
            parts: The record's bytes.
            keys: As in :meth:`append`.
            what: As in :meth:`append`.

        Returns:
            The record's offset in the file, in bytes.
        """
        data = b"".join(parts)
        if self._lane is not None or len(data) > SMALL_RECORD:
            return self.append(len(data), lambda: [memoryview(data)], keys, what)
        offset = self._reserve_offset(len(data), keys)
        try:
            self._stream.put_small(data, what)
        except BaseException as exc:
            self._stream.fail(exc)
            raise
        return offset

    def append_each(self, records: Sequence[bytes | memoryview], whats: Sequence[str]) -> None:
        """Append small records, each of one item: faster than :meth:`append_small` for each.

        Args:
            records: The bytes of each, up to ``SMALL_RECORD``; they are copied before this returns.
            whats: The name of each (a key) in errors.
        """
        sizes = list(map(len, records))
        if self._lane is not None or max(sizes, default=0) > SMALL_RECORD:
            for record, what in zip(records, whats, strict=True):
                self.append_small((record,), what=what)
            return
        self._reserve_offset(sum(sizes), len(sizes))
        try:
            for record, what in zip(records, whats, strict=True):
                self._stream.put_small(record, what)
        except BaseException as exc:
            self._stream.fail(exc)
            raise

    def end(self) -> None:
        """Write the last block, or hand it to the pool; no record follows."""
        for waiting in self._waiting:
            waiting.result()
        self._stream.end()

    def close(self, rank: int) -> FileRecord:
        """Wait for all records and fsync the file.

        Args:
            rank: The rank that writes it.

        Returns:
            The file's record.

        Raises:
            Exception: The error of a record.
        """
        try:
            self.end()
            table = self._stream.finish()
        finally:
            self.stop()
        return make_record(self._name, self.position, rank, self._keys, table)

    def _reserve_offset(self, nbytes: int, keys: int) -> int:
        if self._stream.error is not None:
            raise self._stream.error
        offset = self.position
        self.position = offset + nbytes
        self._keys += keys
        return offset

    def stop(self) -> None:
        """Wait until no thread uses the descriptors, and close them: a reused number would be another file's."""
        if self._lane is not None:
            self._lane.shutdown(cancel_futures=True)
        self._waiting = []
        self._stream.stop()
        if self._file is not None:
            self._file.close()

    def _put(self, offset: int, nbytes: int, produce: Produce, what: str, release: Callable[[], None] | None) -> None:
        if self._stream.error is not None:
            raise self._stream.error
        try:
            if nbytes <= SMALL_RECORD:
                data = b"".join(produce())
                if release is not None:
                    release()
                self._check_size(offset, nbytes, len(data))
                self._stream.put_small(data, what)
                if self.sha256 is not None:
                    self.sha256.update(data)
            else:
                self._put_large(offset, nbytes, produce, what, release)
        except BaseException as exc:
            self._stream.fail(exc)
            raise

    def _put_large(
        self, offset: int, nbytes: int, produce: Produce, what: str, release: Callable[[], None] | None
    ) -> None:
        """Produce a record once the pool may hold one more, and hand its parts to the pool."""
        self._pool.records.acquire()  # before produce(): it limits the records in memory, not only those in the queue
        try:
            parts = [memoryview(part).cast("B") for part in produce()]
            self._check_size(offset, nbytes, sum(part.nbytes for part in parts))
        except BaseException:
            self._pool.records.release()
            raise

        def end_record() -> None:
            if release is not None:
                release()
            self._pool.records.release()

        # released when both have ended: the writes of the pool, and this thread's SHA-256
        countdown = Countdown(2, end_record)
        try:
            self._stream.put(parts, countdown.count_down, what)
            while parts:  # popped and deleted: this thread must not keep written parts alive
                part = parts.pop(0)
                if self.sha256 is not None:
                    self.sha256.update(part)
                del part
        finally:
            countdown.count_down()

    def _check_size(self, offset: int, announced: int, found: int) -> None:
        if found != announced:
            raise StorageError(
                f"{self._path}: a record at offset {offset} was announced with {announced} bytes, has {found}"
            )

"""Writing a checkpoint's files: each created once, digested from memory while it is written, fsynced when closed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import StorageError, listed
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME, RECORD_NAME, FileRecord
from shardckpt.storage.digest import SMALL_RECORD, digest_function, preferred
from shardckpt.storage.filesystem import check_file_name
from shardckpt.storage.new_file import NewFile
from shardckpt.storage.packed_shards import PackedShards
from shardckpt.storage.staged_files import check_as_recorded, digest_file
from shardckpt.storage.stream import Countdown, FileStream, WriterPool, start

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from shardckpt.mapping import ShardedBase

#: What the core writes itself, when all else is recorded.
_OURS = frozenset({MARKER_NAME, RECORD_NAME, INTEGRITY_NAME})

Produce = Callable[[], Sequence[memoryview]]


class FileWriter:
    """One new file, written as a sequence of records.

    Records are placed, produced and put in order by the calling thread, and written by the pool, which also digests
    large ones; of large records no more are produced than the pool may have in hand. Where the file's SHA-256 is
    wanted, a thread of its own does the caller's part and hashes: files are hashed side by side, each in its order.

    Args:
        path: The file, which must not exist.
        pool: The threads that write.
        algorithm: Of the digests.
        nbytes: What it will have at least, if that is known.
        sha256: Whether to hash the file.
    """

    def __init__(self, path: Path, pool: WriterPool, algorithm: str, nbytes: int = 0, *, sha256: bool = False) -> None:
        self._path = path
        self._pool = pool
        self._file = NewFile(path, nbytes)
        self._stream = FileStream(self._file, pool, algorithm)
        #: SHA-256 of the records that are written, where it is wanted.
        self.sha256 = hashlib.sha256() if sha256 else None
        self._lane = ThreadPoolExecutor(1, "shardckpt-sha256") if sha256 else None
        self._waiting: list[Future[None]] = []
        self._keys = 0
        #: Offset of the next record, in bytes.
        self.position = 0

    def append(self, nbytes: int, produce: Produce, keys: int = 1, what: str = "") -> int:
        """Place a record of ``nbytes`` bytes and return its offset.

        Parts of 1 MiB and more are written fastest, without a copy, where their place in the file and their address
        in memory leave the same remainder when they are divided by 4096.

        Args:
            nbytes: Size of the record.
            produce: Gives its parts, ``nbytes`` bytes together, which must then stay as they are; called once, in any
                thread.
            keys: How many stored items the record is, for reports.
            what: What the record is (a key), named in errors.

        Raises:
            Exception: what this or an earlier record failed with; the file can no longer be completed.
        """
        offset = self._placed(nbytes, keys)
        if self._lane is None:
            self._put(offset, nbytes, produce, what)
        elif (waiting := start(self._lane, partial(self._put, offset, nbytes, produce, what))) is not None:
            self._waiting.append(waiting)
        return offset

    def append_small(self, parts: Iterable[bytes | memoryview], keys: int = 1, what: str = "") -> int:
        """Place a record whose parts are ready, join them now, and return its offset.

        Quicker than :meth:`append` for records of up to 64 KiB; larger ones are taken, too.

        Args:
            parts: Its bytes.
            keys: As in :meth:`append`.
            what: As in :meth:`append`.

        Raises:
            Exception: as :meth:`append`.
        """
        data = b"".join(parts)
        if self._lane is not None or len(data) > SMALL_RECORD:
            return self.append(len(data), lambda: [memoryview(data)], keys, what)
        offset = self._placed(len(data), keys)
        try:
            self._stream.put_small(data, what)
        except BaseException as exc:
            self._stream.fail(exc)
            raise
        return offset

    def end(self) -> None:
        """No more records come: what is left of them is written, or begins to be."""
        for waiting in self._waiting:
            waiting.result()
        self._stream.end()

    def close(self) -> FileRecord:
        """Wait for all records, fsync, and return the file's record without its rank (0)."""
        try:
            self.end()
            table = self._stream.finish()
        finally:
            self._stop()
        return FileRecord(
            name=self._path.name,
            size=self.position,
            rank=0,
            keys=self._keys,
            digest=table.root(),
            segments=table.pack(),
        )

    def _placed(self, nbytes: int, keys: int) -> int:
        if self._stream.error is not None:
            raise self._stream.error
        offset = self.position
        self.position = offset + nbytes
        self._keys += keys
        return offset

    def _stop(self) -> None:
        """Let no thread use the descriptors any more, and close them."""
        if self._lane is not None:
            self._lane.shutdown(cancel_futures=True)
        self._waiting = []
        self._stream.stop()
        self._file.close()

    def _put(self, offset: int, nbytes: int, produce: Produce, what: str) -> None:
        if self._stream.error is not None:
            raise self._stream.error
        try:
            if nbytes <= SMALL_RECORD:
                data = b"".join(produce())
                self._check_size(offset, nbytes, len(data))
                self._put_small(data, what)
            else:
                self._put_large(offset, nbytes, produce, what)
        except BaseException as exc:
            self._stream.fail(exc)
            raise

    def _put_small(self, data: bytes, what: str) -> None:
        self._stream.put_small(data, what)
        if self.sha256 is not None:
            self.sha256.update(data)

    def _put_large(self, offset: int, nbytes: int, produce: Produce, what: str) -> None:
        """Produce a record when there are not too many already, and hand its parts over."""
        self._pool.records.acquire()
        try:
            parts = [part.cast("B") for part in produce()]
            self._check_size(offset, nbytes, sum(part.nbytes for part in parts))
        except BaseException:
            self._pool.records.release()
            raise
        countdown = Countdown(2, self._pool.records.release)
        try:
            self._stream.put(parts, countdown.count_down, what)
            while parts:
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


class CheckpointWriter:
    """The files that one rank adds to a checkpoint in its staging directory.

    Args:
        directory: The staging directory.
        rank: Noted in every file's record.
        sha256: Whether to hash the files while they are written, for ``integrity.json``.
        algorithm: Of the digests, the same for all files of a checkpoint; by default the one that is preferred here.

    Raises:
        CheckpointingException: the algorithm needs a package that is not installed.
    """

    def __init__(self, directory: Path, rank: int, *, sha256: bool = False, algorithm: str | None = None) -> None:
        #: Where they are made.
        self.directory = directory
        self._rank = rank
        self._sha256 = sha256
        self._algorithm = algorithm or preferred()
        digest_function(self._algorithm)
        self._pool = WriterPool(settings.io_threads())
        self._open: dict[str, FileWriter] = {}
        #: Records of the files that are complete.
        self.files: list[FileRecord] = []
        #: Their SHA-256 in hex, by name, where it is wanted.
        self.sha256: dict[str, str] = {}
        #: The shards that this rank's files hold, as :meth:`record_shards` was told.
        self.shards: list[ShardedBase | PackedShards] = []

    def create(self, name: str, nbytes: int = 0) -> FileWriter:
        """Begin a new file.

        Args:
            name: Of letters, digits, ``.``, ``_`` and ``-``.
            nbytes: What it will have at least, if that is known: space for it is set aside in one go.
        """
        path = self.directory / check_file_name(name)
        writer = FileWriter(path, self._pool, self._algorithm, nbytes, sha256=self._sha256)
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

    def begin(self, name: str, data: bytes | memoryview, keys: int = 1) -> FileWriter:
        """A whole file at once, to be finished: of several, all are better begun before the first is finished.

        (What a file system does for the first then serves all.)
        """
        writer = self.create(name)
        view = memoryview(data)
        writer.append(view.nbytes, lambda: [view], keys=keys)
        writer.end()
        return writer

    def write(self, name: str, data: bytes | memoryview, keys: int = 1) -> FileRecord:
        """A whole small file at once."""
        return self.finish(self.begin(name, data, keys))

    def adopt(self, name: str, keys: int = 1) -> FileRecord:
        """Take over a file that a library or another process has written into :attr:`directory`, completely.

        It is fsynced, and read once for its digests, which are of what it has then. What lies in the directory and is
        neither written by this class nor adopted fails the save.

        Args:
            name: Of letters, digits, ``.``, ``_`` and ``-``: a regular file in the directory itself.
            keys: How many stored items the file has, for reports.

        Raises:
            CheckpointingException: there is no such file, it is not a regular one, or it changes meanwhile.
        """
        path = self.directory / check_file_name(name)
        record, sha256 = digest_file(path, self._algorithm, keys, self._rank, sha256=self._sha256)
        self.files.append(record)
        if sha256:
            self.sha256[name] = sha256
        return record

    def record_shards(self, shards: Iterable[ShardedBase] | PackedShards) -> None:
        """Say which shards this rank's files hold; each rank does, in one call or several.

        Before the commit it is compared with what the strategy was given: each box of a tensor, and each object, must
        be recorded, on whichever rank, and however it is cut. Of a replicated shard one copy is enough.

        Args:
            shards: ShardedTensors and ShardedObjects; their data is not looked at.
        """
        self.shards.extend([shards] if isinstance(shards, PackedShards) else shards)

    def recorded_files(self) -> list[FileRecord]:
        """The records of all files, when no more is written.

        Raises:
            StorageError: names files that were begun and not finished, that were changed since, or that are the core's
                own to write.
        """
        if self._open:
            raise StorageError(
                f"{self.directory}: files were begun and not finished: {listed(sorted(map(repr, self._open)))}; after "
                "the last record of a file call writer.finish(file), which makes it durable and records its digests"
            )
        own = [repr(file.name) for file in self.files if file.name in _OURS]
        if own:
            raise StorageError(f"{self.directory}: {listed(own)} is written by the commit: give another name")
        check_as_recorded(self.directory, self.files)
        return list(self.files)

    def close(self) -> None:
        """End the threads; files that were not finished stay incomplete."""
        for writer in self._open.values():
            writer._stop()  # noqa: SLF001 - the writer's own half of the same machinery
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["CheckpointWriter", "FileWriter", "Produce"]

"""Write a checkpoint's files: each is created once, digested from memory while it is written, and fsynced at its end.

Digests are of the caller's memory, not of what is read back: what the disk or the kernel damages shows when it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import PluginError, StorageError, listed
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME, NAME_RULE, RECORD_NAME, TABLE_SUFFIX, is_file_name
from shardckpt.storage.digest import SMALL_RECORD, Segments, digest_function, preferred
from shardckpt.storage.filesystem import make_folders
from shardckpt.storage.new_file import NewFile
from shardckpt.storage.packed_shards import PackedShards
from shardckpt.storage.staged_files import check_as_recorded, digest_file, make_record
from shardckpt.storage.stream import Countdown, FileStream, WriterPool, start

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

    from shardckpt.manifest import FileRecord
    from shardckpt.mapping import ShardedBase

#: Names that the commit writes itself, after all other files are recorded.
_OURS = frozenset({MARKER_NAME, RECORD_NAME, INTEGRITY_NAME})

#: Characters of a packed table that stays in its record, at most: a table file would take more than it saves.
_INLINE_TABLE = 256
#: Table files that are written at a time.
_TABLES_AT_ONCE = 16

Produce = Callable[[], Sequence[memoryview]]


class FileWriter:
    """One new file, written as a sequence of records; :meth:`CheckpointWriter.create` makes it.

    The calling thread assigns each record its offset and calls ``produce``; the pool writes, and digests large records.
    ``produce`` waits while the pool has as many large records as it may hold, which bounds memory. If the file's
    SHA-256 is requested, a thread of this file does the caller's part and hashes: SHA-256 needs the bytes in order, and
    so several files are hashed in parallel.
    """

    def __init__(
        self, directory: Path, name: str, pool: WriterPool, algorithm: str, nbytes: int = 0, *, sha256: bool = False
    ) -> None:
        path = directory / name
        self._name = name
        self._path = path
        self._pool = pool
        self._file = NewFile(path, nbytes)
        self._stream = FileStream(self._file, pool, algorithm)
        #: SHA-256 of the records so far, if it is requested.
        self.sha256 = hashlib.sha256() if sha256 else None
        self._lane = ThreadPoolExecutor(1, "shardckpt-sha256") if sha256 else None
        self._waiting: list[Future[None]] = []
        self._keys = 0
        #: Offset of the next record, in bytes.
        self.position = 0

    def append(self, nbytes: int, produce: Produce, keys: int = 1, what: str = "") -> int:
        """Append a record of ``nbytes`` bytes, right behind the one before: nothing is padded.

        Parts of 1 MiB and more are written fastest if their offset in the file and their address in memory are equal
        modulo 4096: then direct writes take the bytes from where they are, without a copy.

        Args:
            nbytes: Size of the record in bytes; 0 is a record, too.
            produce: Returns the record's parts, ``nbytes`` bytes together, which must not change until
                :meth:`CheckpointWriter.finish` returns; called once, in any thread.
            keys: How many stored items the record holds, for reports.
            what: What the record is (a key), named in errors.

        Returns:
            The record's offset in the file, in bytes.

        Raises:
            Exception: what this or an earlier record failed with; the file can no longer be completed.

        Example:
            >>> file = writer.create("weights.bin")  # doctest: +SKIP
            >>> offset = file.append(tensor.nbytes, lambda: [tensor_bytes(tensor)], what="layer.weight")
            >>> record = writer.finish(file)
        """
        offset = self._reserve_offset(nbytes, keys)
        if self._lane is None:
            self._put(offset, nbytes, produce, what)
        elif (waiting := start(self._lane, partial(self._put, offset, nbytes, produce, what))) is not None:
            self._waiting.append(waiting)
        return offset

    def append_small(self, parts: Iterable[bytes | memoryview], keys: int = 1, what: str = "") -> int:
        """Append a record whose parts are ready; they are copied before this returns.

        Faster than :meth:`append` for records of up to 64 KiB; larger ones are accepted, too.

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
            Exception: what a record failed with.
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
        self._file.close()

    def _put(self, offset: int, nbytes: int, produce: Produce, what: str) -> None:
        if self._stream.error is not None:
            raise self._stream.error
        try:
            if nbytes <= SMALL_RECORD:
                data = b"".join(produce())
                self._check_size(offset, nbytes, len(data))
                self._stream.put_small(data, what)
                if self.sha256 is not None:
                    self.sha256.update(data)
            else:
                self._put_large(offset, nbytes, produce, what)
        except BaseException as exc:
            self._stream.fail(exc)
            raise

    def _put_large(self, offset: int, nbytes: int, produce: Produce, what: str) -> None:
        """Produce a record once the pool may hold one more, and hand its parts to the pool."""
        self._pool.records.acquire()  # before produce(): it limits what exists, not only what is queued
        try:
            parts = [part.cast("B") for part in produce()]
            self._check_size(offset, nbytes, sum(part.nbytes for part in parts))
        except BaseException:
            self._pool.records.release()
            raise
        # released when both have ended: the writes of the pool, and this thread's SHA-256
        countdown = Countdown(2, self._pool.records.release)
        try:
            self._stream.put(parts, countdown.count_down, what)
            while parts:  # popped and deleted: this thread must not keep alive what the pool has written already
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
    """Writes the files that one rank adds to a checkpoint in its staging directory; a context manager.

    Args:
        directory: The staging directory.
        rank: Stored in every file's record.
        sha256: Whether to compute the files' SHA-256 while they are written, for ``integrity.json``.
        algorithm: Name of the digest algorithm, the same for all files of a checkpoint; by default the fastest that is
            installed.
        author: The strategy that names the files, as errors name it.

    Raises:
        CheckpointingException: the algorithm needs a package that is not installed.
    """

    def __init__(
        self, directory: Path, rank: int, *, sha256: bool = False, algorithm: str | None = None, author: str = ""
    ) -> None:
        #: The staging directory.
        self.directory = directory
        self._rank = rank
        self._sha256 = sha256
        self._author = author
        self._algorithm = algorithm or preferred()
        digest_function(self._algorithm)
        self._pool = WriterPool(settings.io_threads())
        self._open: dict[str, FileWriter] = {}
        #: Records of the files that are complete.
        self.files: list[FileRecord] = []
        #: Their SHA-256 in hex, by name, if it is requested.
        self.sha256: dict[str, str] = {}
        #: The shards that this rank's files hold, as passed to :meth:`record_shards`.
        self.shards: list[ShardedBase | PackedShards] = []

    def create(self, name: str, nbytes: int = 0) -> FileWriter:
        """Create a new file.

        Args:
            name: Its name: letters, digits, ``.``, ``_`` and ``-`` only. Or a path of such names, joined by ``/``: its
                folders are created. :data:`shardckpt.manifest.NAME_RULE` has the limits.
            nbytes: The least size in bytes, if it is known: the space is then allocated in one call, before the first
                write.

        Returns:
            The file, to which records are appended; pass it to :meth:`finish` at the end.

        Raises:
            PluginError: the name is not allowed.
            StorageError: the file exists, or another file has the name of one of its folders.
        """
        self._check_name(name)
        make_folders(self.directory, name)
        writer = FileWriter(self.directory, name, self._pool, self._algorithm, nbytes, sha256=self._sha256)
        self._open[name] = writer
        return writer

    def finish(self, writer: FileWriter) -> FileRecord:
        """Complete a file: all its bytes are durable when this returns.

        Args:
            writer: What :meth:`create` or :meth:`begin` returned.

        Returns:
            The file's record: name, size and digests.

        Raises:
            Exception: what a record of the file failed with.
        """
        record = writer.close(self._rank)
        del self._open[record.name]
        self.files.append(record)
        if writer.sha256 is not None:
            self.sha256[record.name] = writer.sha256.hexdigest()
        return record

    def begin(self, name: str, data: bytes | memoryview, keys: int = 1) -> FileWriter:
        """Create a file with all its bytes, and leave it to :meth:`finish` to make it durable.

        Begin several small files before you finish the first: what the file system does for the first fsync (a
        commit of its journal) then serves all.

        Args:
            name: As in :meth:`create`.
            data: All bytes of the file; they must not change until it is finished.
            keys: How many stored items the file has, for reports.

        Returns:
            The file, to be passed to :meth:`finish`.
        """
        writer = self.create(name)
        view = memoryview(data)
        writer.append(view.nbytes, lambda: [view], keys=keys)
        writer.end()
        return writer

    def write(self, name: str, data: bytes | memoryview, keys: int = 1) -> FileRecord:
        """Write a small file with all its bytes, durably: :meth:`begin` and :meth:`finish`; return its record."""
        return self.finish(self.begin(name, data, keys))

    def adopt(self, name: str, keys: int = 1) -> FileRecord:
        """Take over a file that a library or another process has written into :attr:`directory`, completely.

        The file is fsynced, and read once to compute its digests: damage from before that read is not found. A file in
        the directory that is neither written by this class nor adopted fails the save.

        Args:
            name: A regular file, by its path in the directory; as in :meth:`create`.
            keys: How many stored items the file has, for reports.

        Returns:
            The file's record.

        Raises:
            CheckpointingException: the name is not allowed, there is no such file, it is not a regular one, one of its
                folders is a link, or it changes while it is read.
        """
        self._check_name(name)
        record, sha256 = digest_file(self.directory, name, self._algorithm, keys, self._rank, sha256=self._sha256)
        self.files.append(record)
        if sha256:
            self.sha256[name] = sha256
        return record

    def move_tables(self, files: Iterable[FileRecord]) -> list[FileRecord]:
        """Write the tables of digests of some files into files of their own beside them, durably.

        Small tables stay in their records, and so do those whose files have names that are too long for another suffix.

        Args:
            files: Records of complete files, which may be of other writers.

        Returns:
            The records in the same order; those whose tables were written say so.

        Raises:
            StorageError: another file has the name of a table file.
        """
        moved, waiting = list(files), []
        for number, file in enumerate(moved):
            name = f"{file.name}{TABLE_SUFFIX}"
            if isinstance(file.segments, str) and len(file.segments) > _INLINE_TABLE and is_file_name(name):
                table = Segments.unpack(file.segments, file.digest, file.size, self._algorithm).to_bytes()
                moved[number] = file.model_copy(update={"segments": len(table)})
                waiting.append(self.begin(name, table, keys=0))
            if len(waiting) == _TABLES_AT_ONCE:
                self._finish_tables(waiting)
        self._finish_tables(waiting)
        return moved

    def _finish_tables(self, waiting: list[FileWriter]) -> None:
        """Complete table files: their content has a digest in the record of the file that they are beside."""
        for writer in waiting:
            self.finish(writer)
            self.files.pop()
        waiting.clear()

    def record_shards(self, shards: Iterable[ShardedBase] | PackedShards) -> None:
        """Record which shards this rank's files hold; each rank calls it, once or more.

        Before the commit the records of all ranks are compared with what the strategy was given: some rank must have
        recorded each box of a tensor and each object, in whatever parts. One copy of a replicated shard is enough.

        Args:
            shards: ShardedTensors and ShardedObjects; their data is not used.
        """
        self.shards.extend([shards] if isinstance(shards, PackedShards) else shards)

    def recorded_files(self) -> list[FileRecord]:
        """Return the records of all files, after the last one is finished.

        Raises:
            StorageError: names files that were begun and not finished, or that were changed after that.
            PluginError: names files that only the commit may write.
        """
        if self._open:
            raise StorageError(
                f"{self.directory}: files were begun and not finished: {listed(sorted(map(repr, self._open)))}; after "
                "the last record of a file call writer.finish(file), which makes it durable and records its digests"
            )
        own = [repr(file.name) for file in self.files if file.name.partition("/")[0] in _OURS]
        if own:
            raise PluginError(
                f"{self.directory}: {self._author or 'a strategy'} has written {listed(own)}: give it another name, "
                f"since {listed(sorted(map(repr, _OURS)))} are written by the commit"
            )
        check_as_recorded(self.directory, self.files)
        return list(self.files)

    def close(self) -> None:
        """End the threads; files that were not finished stay incomplete."""
        for writer in self._open.values():
            writer.stop()
        self._pool.close()

    def _check_name(self, name: str) -> None:
        if not is_file_name(name):
            raise PluginError(f"{self._author or 'a strategy'} gives a file the name {name!r:.300}: {NAME_RULE}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

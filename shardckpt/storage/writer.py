"""Write a checkpoint's files: each is created once, digested from memory while it is written, and fsynced at its end.

Digests are of the caller's memory, not of bytes read back: a later read shows damage by the disk or the kernel.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException, PluginError, StorageError, listed
from shardckpt.manifest.names import (
    FINGERPRINTS_NAME,
    INTEGRITY_NAME,
    MARKER_NAME,
    NAME_RULE,
    RECORD_NAME,
    TABLE_SUFFIX,
    is_file_name,
)
from shardckpt.mapping.base import ShardedBase
from shardckpt.storage.digest import Segments, digest_function, preferred
from shardckpt.storage.file_writer import FileWriter
from shardckpt.storage.filesystem import make_folders
from shardckpt.storage.memory_budget import (
    check_memory_budget,
    find_least_upload,
    find_upload_room,
    plan_upload,
    plan_write_threads,
    show_budget,
)
from shardckpt.storage.packed_shards import PackedShards
from shardckpt.storage.shared_file import SharedFile, merge_parts
from shardckpt.storage.staged_files import FilePart, check_as_recorded, digest_file
from shardckpt.storage.stream import WriterPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from typing_extensions import Self

    from shardckpt.manifest.models import FileRecord
    from shardckpt.storage.store_abilities import ObjectWriter, StreamsWrites

#: Names that the commit writes itself, after all other files are recorded.
_OURS = frozenset({MARKER_NAME, RECORD_NAME, INTEGRITY_NAME, FINGERPRINTS_NAME})

#: Characters of a packed table that stays in its record, at most: a table file would take more than it saves.
_INLINE_TABLE = 256
#: Table files that are written at a time.
_TABLES_AT_ONCE = 16


class WriteTimes(NamedTuple):
    """When a rank wrote its files, by ``time.perf_counter``, which all processes of a host share.

    ``began`` is when the first file was created, 0.0 if none was; ``ended`` is when the last one was durable;
    ``synced`` is the seconds between in which it waited for fsync.
    """

    began: float = 0.0
    ended: float = 0.0
    synced: float = 0.0


class CheckpointWriter:
    """Writes the files that one rank adds to a checkpoint in its staging directory; a context manager.

    Args:
        directory: The staging directory.
        rank: Stored in every file's record.
        sha256: Whether to compute the files' SHA-256 while they are written, for ``integrity.json``.
        algorithm: Name of the digest algorithm, the same for all files of a checkpoint; by default the fastest that is
            installed.
        author: The strategy that names the files, as errors name it.
        fingerprints: Whether the strategy is to compute :attr:`sums`.
        count: Called by each thread with the number of bytes that it has written since the last call.
        store: The checkpoint's folder on a store that streams writes: files are then objects of it from the start. Only
            files that others write, or that several ranks share, go to ``directory``. The marker alone is held back, in
            :attr:`marker`.
        streamed: The set to which the names of these objects are added, for :attr:`streamed`.
        memory_budget: Bytes that may be in memory at a time besides the tensors, the objects and the index; None: as
            many as are fast.

    Raises:
        CheckpointingException: the algorithm needs a package that is not installed.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        sha256: bool = False,
        algorithm: str | None = None,
        author: str = "",
        fingerprints: bool = False,
        count: Callable[[int], None] | None = None,
        store: StreamsWrites | None = None,
        streamed: set[str] | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self._store = store
        #: Names of the objects that were begun on the store.
        self.streamed: set[str] = set() if streamed is None else streamed
        #: The marker's bytes, once it is written, where files are streamed to a store: the commit writes it last.
        self.marker: bytes | None = None
        #: The staging directory.
        self.directory = directory
        self._rank = rank
        self._sha256 = sha256
        self._author = author
        self._algorithm = algorithm or preferred()
        digest_function(self._algorithm)
        self._pool = WriterPool(plan_write_threads(memory_budget), count)
        self._memory_budget = memory_budget
        self._open: dict[str, FileWriter | SharedFile] = {}
        #: Names of all files that were begun.
        self._begun: set[str] = set()
        #: Name of the open object of several parts. Only with a memory budget, which allows one at a time; else "".
        self._in_parts = ""
        #: Records of the files that are complete.
        self.files: list[FileRecord] = []
        #: This rank's parts of files that other ranks write, too.
        self.parts: list[FilePart] = []
        #: Their SHA-256 in hex, by name, if it is requested.
        self.sha256: dict[str, str] = {}
        #: Whether the strategy is to add the sums of its stored boxes to :attr:`sums`.
        self.fingerprints = fingerprints
        #: The results of :func:`shardckpt.storage.sum_shards` for the boxes of this rank.
        self.sums: list[bytes] = []
        #: Fingerprints by key that are stored unchanged, on the main rank: their values were only copied.
        self.known_fingerprints: dict[str, str] = {}
        #: The shards that this rank's files hold, as passed to :meth:`record_shards`.
        self.shards: list[ShardedBase | PackedShards] = []
        #: When the files so far were written.
        self.times = WriteTimes()

    @property
    def is_streamed(self) -> bool:
        """Whether files go to a store while they are written."""
        return self._store is not None

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
        self._begin_file(name)
        store = self._open_store(name)
        part_bytes = 0 if store is None else self._choose_part_bytes(name, nbytes)
        self._open[name] = writer = self._open_file(name, nbytes, store, part_bytes)
        return writer

    def finish(self, writer: FileWriter) -> FileRecord:
        """Complete a file: all its bytes are durable when this returns.

        Args:
            writer: A file that :meth:`create` or :meth:`begin` returned.

        Returns:
            The file's record: name, size and digests.

        Raises:
            Exception: The error of a record of the file.
        """
        record = writer.close(self._rank)
        self._end_file(writer)
        del self._open[record.name]
        if record.name == self._in_parts:
            self._in_parts = ""
        self.files.append(record)
        if writer.sha256 is not None:
            self.sha256[record.name] = writer.sha256.hexdigest()
        return record

    def begin(self, name: str, data: bytes | memoryview, keys: int = 1) -> FileWriter:
        """Create a file with all its bytes, and leave it to :meth:`finish` to make it durable.

        Begin several small files before you finish the first: the file system's work for the first fsync (a commit of
        its journal) then serves all.

        Args:
            name: As in :meth:`create`.
            data: All bytes of the file; they must not change until it is finished.
            keys: How many stored items the file has, for reports.

        Returns:
            The file, to be passed to :meth:`finish`.
        """
        try:
            view = memoryview(data)
        except TypeError as exc:
            raise PluginError(f"{self._name_author()} writes {name!r} of a {type(data).__name__}: give bytes") from exc
        if not view.c_contiguous:
            raise PluginError(
                f"{self._name_author()} writes {name!r} of a {type(data).__name__} whose bytes are not in order: give "
                "a contiguous copy (numpy.ascontiguousarray)"
            )
        # to allocate the space of a file on disk first would gain nothing: all is written at once
        writer = self.create(name, 0 if self._store is None else view.nbytes)
        writer.append(view.nbytes, lambda: [view], keys=keys)
        writer.end()
        return writer

    def write(self, name: str, data: bytes | memoryview, keys: int = 1) -> FileRecord:
        """Write a small file with all its bytes, durably: :meth:`begin` and :meth:`finish`; return its record."""
        return self.finish(self.begin(name, data, keys))

    def share(self, name: str, size: int) -> SharedFile:
        """Open a file that other ranks write, too, each to ranges of its own; the first rank creates it.

        Args:
            name: As in :meth:`create`; the same on every rank that writes to the file.
            size: Bytes of the entire file.

        Returns:
            The file, to which ranges are written; pass it to :meth:`finish_part` at the end. The save fails unless the
            parts of all ranks fill the file.

        Raises:
            PluginError: the name is not allowed.
            StorageError: the file cannot be created.
        """
        self._begin_file(name)
        make_folders(self.directory, name)
        file = SharedFile(self.directory, name, size, self._pool, self._algorithm)
        self._open[name] = file
        return file

    def finish_part(self, file: SharedFile) -> None:
        """Complete this rank's part of a file: its bytes are durable when this returns.

        Args:
            file: A file that :meth:`share` returned.

        Raises:
            Exception: The error of a write.
        """
        part = file.finish(self._rank)
        self._end_file(file)
        del self._open[part.name]
        if sum(part.lengths) < part.size:
            self.parts.append(part)
            return
        self.files += merge_parts([part], self._algorithm)
        self.hash_files([part.name])

    def complete_parts(self, parts: Iterable[FilePart]) -> list[FileRecord]:
        """Return the records of files whose parts all ranks have written; for the commit.

        Args:
            parts: The parts of all ranks.

        Returns:
            The records.

        Raises:
            StorageError: the parts of a file do not fill it.
        """
        return merge_parts(parts, self._algorithm)

    def hash_files(self, names: Iterable[str]) -> None:
        """Read files for their SHA-256, if it is requested: it needs the bytes in order, and they were not written so.

        Args:
            names: Complete files, which other ranks may have written.

        Raises:
            StorageError: one cannot be read.
        """
        for name in names if self._sha256 else ():
            _, self.sha256[name] = digest_file(self.directory, name, self._algorithm, 0, self._rank, sha256=True)

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
        """Write the tables of digests of some files into files of their own next to them, durably.

        Small tables stay in their records, and so do those whose files have names that are too long for another suffix.

        Args:
            files: Records of complete files, which may be of other writers.

        Returns:
            The records in the same order; those whose tables were written say so.

        Raises:
            CheckpointingException: another file has the name of a table file.
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
        """Complete table files: their content has a digest in the record of the file that they are about."""
        for writer in waiting:
            self.finish(writer)
            self.files.pop()
        waiting.clear()

    def record_shards(self, shards: Iterable[ShardedBase] | PackedShards) -> None:
        """Record which shards this rank's files hold; each rank calls it, once or more.

        Before the commit the records of all ranks are compared with the shards that the strategy was given: some rank
        must have recorded each box of a tensor and each object, in whatever parts. One copy of a replicated shard is
        enough.

        Args:
            shards: ShardedTensors and ShardedObjects; their data is not used.

        Raises:
            PluginError: they are something else, such as one shard, or keys.
        """
        is_one = isinstance(shards, ShardedBase | str)
        given: list[Any] = [shards] if is_one or isinstance(shards, PackedShards) else [*shards]
        wrong = given if is_one else [each for each in given if not isinstance(each, ShardedBase | PackedShards)]
        if wrong:
            raise PluginError(
                f"{self._name_author()} calls record_shards with {wrong[0]!r:.60}: give a list of the ShardedTensors "
                "and ShardedObjects that this rank's files hold"
            )
        self.shards.extend(given)

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
        reserved = [repr(file.name) for file in self.files if file.name.partition("/")[0] in _OURS]
        if reserved:
            raise PluginError(
                f"{self.directory}: {self._name_author()} has written {listed(reserved)}: give it another name, "
                f"since {listed(sorted(map(repr, _OURS)))} are written by the commit"
            )
        written: list[FileRecord | FilePart] = [*self.files, *self.parts]
        check_as_recorded(self.directory, (file for file in written if file.name not in self.streamed))
        return list(self.files)

    def close(self) -> None:
        """End the threads; files that were not finished stay incomplete."""
        for writer in self._open.values():
            writer.stop()
        self._pool.close()

    def _open_file(self, name: str, nbytes: int, store: StreamsWrites | None, part_bytes: int) -> FileWriter:
        """Open a new file in the staging directory, or on a store in parts of so many bytes."""
        return FileWriter(
            self.directory,
            name,
            self._pool,
            self._algorithm,
            nbytes,
            sha256=self._sha256,
            store=store,
            part_bytes=part_bytes,
        )

    def _open_store(self, name: str) -> StreamsWrites | None:
        """Return where a new file is streamed to; None if it is written to the staging directory."""
        if self._store is None:
            return None
        if name in self.streamed or (self.directory / name).exists():
            raise StorageError(f"cannot create {name!r}: this rank has written a file of that name")
        self.streamed.add(name)
        return _HeldMarker(self) if name == MARKER_NAME else self._store

    def _choose_part_bytes(self, name: str, nbytes: int) -> int:
        """Return the size of the parts in which a new object of ``nbytes`` is sent to the store.

        A memory budget has room for the parts of one object at a time: an object that needs several parts is an error
        while another such one is open, or if the budget is too small for its parts.
        """
        budget = self._memory_budget
        found = plan_upload(find_upload_room(budget), nbytes)
        if budget is None or nbytes <= found.part_bytes:
            return found.part_bytes
        check_memory_budget(budget, find_least_upload(nbytes), f"to send {name!r} of {nbytes} bytes to a store takes")
        if self._in_parts:
            raise CheckpointingException(
                f"{show_budget(budget)}: {name!r} is sent together with {self._in_parts!r}, and the budget is for the "
                "parts of one file at a time: let the strategy write one file a rank (thread_count=1), or give no "
                "memory_budget"
            )
        self._in_parts = name
        return found.part_bytes

    def _begin_file(self, name: str) -> None:
        self._check_name(name)
        if name in self._begun:
            raise PluginError(f"{self._name_author()} writes {name!r} twice: a file is written once; give another name")
        self._begun.add(name)
        if self._store is None:
            make_folders(self.directory, name)
        self.times = self.times._replace(began=self.times.began or time.perf_counter())

    def _end_file(self, file: FileWriter | SharedFile) -> None:
        synced = self.times.synced + file.sync_seconds
        self.times = self.times._replace(ended=time.perf_counter(), synced=synced)

    def _name_author(self) -> str:
        return self._author or "a strategy"

    def _check_name(self, name: str) -> None:
        if not is_file_name(name):
            raise PluginError(f"{self._name_author()} gives a file the name {name!r:.300}: {NAME_RULE}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _HeldMarker:
    """Keeps the marker of a save to a store in memory, as :attr:`CheckpointWriter.marker`, instead of sending it."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._parts: list[memoryview] = []

    def open_write(self, _: str, part_bytes: int) -> ObjectWriter:  # noqa: ARG002 - as of a store
        return self

    def write(self, part: memoryview) -> None:
        self._parts.append(part)

    def close(self) -> None:
        self._writer.marker = b"".join(self._parts)

    def abort(self) -> None:
        self._parts.clear()

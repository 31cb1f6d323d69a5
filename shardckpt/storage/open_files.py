"""The files of a checkpoint that are open for reading: a bounded number, however many files there are."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, CheckpointReplacedError, CorruptCheckpointError, StorageError
from shardckpt.manifest.names import RECORD_NAME, list_files
from shardckpt.storage.descriptors import note_keeper
from shardckpt.storage.digest import Segments, limit_table
from shardckpt.storage.directory import RelativePath, was_replaced
from shardckpt.storage.filesystem import (
    check_file_name,
    check_foreign_name,
    file_size,
    refuse_linked_folders,
)
from shardckpt.storage.input_file import may_be_same, open_existing, read_all

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.manifest.models import FileRecord
    from shardckpt.manifest.plain import PlainFile

#: Files that a reader keeps open; those above this number are closed, and reopened when they are read.
OPEN_FILES = 64
#: Characters of a table of digests that is kept for the next reader: the table of a file of 5 GiB.
_SMALL_TABLE = 256 << 10


class OpenFile:
    """A file open for reading; CorruptCheckpointError if it does not have the recorded size.

    Args:
        name: Its name in the checkpoint.
        record: The record of the file from its save, if there is one.
        algorithm: Name of the digest algorithm, if digests are checked.
        advise: Returns advice for a file of another size than was recorded.
        accepts_cut: Whether a shorter file is no error: the bytes before its end are read.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        record: FileRecord | PlainFile | None,
        algorithm: str | None,
        read_table: Callable[[FileRecord | PlainFile, str], bytes],
        advise: Callable[[], str],
        *,
        accepts_cut: bool = False,
    ) -> None:
        self.path = path
        self.name = name
        self.input = open_existing(path)
        self.size = self.input.size
        self.is_open = True
        self.users = 0
        self._record = record
        self._algorithm = algorithm
        self._segments: Segments | None = None
        self._read_table = read_table
        if record is not None and self.size != record.size and not (accepts_cut and self.size < record.size):
            self.close()
            raise CorruptCheckpointError(f"{path}: it has {self.size} bytes, {record.size} were written: {advise()}")

    @property
    def segments(self) -> Segments | None:
        """The table of digests, read or unpacked at the first access; None if digests are not checked."""
        if self._segments is None and self._record is not None and self._algorithm is not None:
            record = self._record
            try:
                if isinstance(record.segments, str):
                    # the table of equal text may be the one of an earlier call, and is not changed
                    unpack = _unpack_again if len(record.segments) <= _SMALL_TABLE else Segments.unpack
                    self._segments = unpack(record.segments, record.digest, record.size, self._algorithm)
                else:
                    table = self._read_table(record, self._algorithm)
                    self._segments = Segments.from_bytes(table, record.digest, record.size, self._algorithm)
            except CheckpointReplacedError:
                raise
            except CorruptCheckpointError as exc:
                where = f" (in {record.table_name})" if record.table_name else ""
                raise CorruptCheckpointError(f"{self.path}: {exc}{where}") from exc
        return self._segments

    def differs_error(self, start: int, stop: int) -> CorruptCheckpointError:
        """Return the error of bytes that do not have their digest."""
        return CorruptCheckpointError(
            f"bytes {start} to {stop} of {self.path} are not those that were written (digest differs)"
        )

    def reopen(self) -> None:
        """Open the file after :meth:`close`, if it is still the same file with the same size."""
        # by path, so it may be another file by now, to which the table of digests in memory does not belong
        found = open_existing(self.path)
        if not may_be_same(self.input.status, found.status):
            found.close()
            raise StorageError(
                f"{self.path}: it is not the file that was there when reading began: something has replaced the "
                "checkpoint meanwhile, load it again"
            )
        if found.size != self.size:
            found.close()
            raise CorruptCheckpointError(
                f"{self.path}: it had {self.size} bytes and has {found.size}: something writes to it"
            )
        self.input, self.is_open = found, True

    def close(self) -> None:
        """Close the file, if it is open."""
        if self.is_open:
            self.is_open = False
            self.input.close()


class OpenFiles:
    """Open files by name; the least recently used are closed where too many are open. For several threads.

    Args:
        records: The files' records by name; None if the checkpoint has no record.
        algorithm: Name of the digest algorithm, if digests are checked.
        detect_replacement: Returns the context in which files are opened; see :func:`directory.detect_replacement`.
    """

    def __init__(
        self,
        directory: Path,
        records: Mapping[str, FileRecord | PlainFile] | None,
        algorithm: str | None,
        detect_replacement: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._directory = directory
        self._records = records
        self._algorithm = algorithm
        self._detect_replacement = detect_replacement
        #: As for :class:`OpenFile`.
        self.accepts_cut = False
        #: (size, mtime) of files without a record, when they were first opened: nothing else shows a change of them.
        self._stamps: dict[str, tuple[int, int]] = {}
        self._lock = threading.RLock()
        self._files: dict[str, OpenFile] = {}
        #: Those that are open, the most recently used one last.
        self._open: dict[str, OpenFile] = {}
        note_keeper(self)

    def open_unshared(self, name: str) -> OpenFile:
        """Open a file for the caller alone, who closes it, and return it."""
        # another library's checkpoint may have names that none of ours has
        is_recorded = self._records is not None
        path = self._directory / (check_file_name(name) if is_recorded else check_foreign_name(name))
        record = None if self._records is None else self._records.get(name)
        if self._records is not None and record is None:
            raise CorruptCheckpointError(f"{path} is asked for and not one of the files of the checkpoint")
        with self._detect_replacement():
            refuse_linked_folders(self._directory, name)
            try:
                file = OpenFile(
                    path, name, record, self._algorithm, self._read_table, self._advise, accepts_cut=self.accepts_cut
                )
            except StorageError as exc:
                if not isinstance(exc.__cause__, FileNotFoundError):
                    raise
                advice = "it is missing; restore it from a copy, or load another checkpoint"
                raise StorageError(f"{exc}: {advice}") from exc.__cause__
        if record is None and isinstance(path, RelativePath) and (found := file.input.status) is not None:
            self._stamps.setdefault(name, _stamp(found))
        return file

    def check_unchanged(self) -> None:
        """Raise StorageError if something has written to a file without a record since it was first opened.

        Other libraries write into the directory that they overwrite. (A save of this library exchanges directories: in
        one that was replaced, files only disappear.)
        """
        for name, before in self._stamps.items():
            path = self._directory / name
            try:
                now = _stamp(path.lstat())
            except FileNotFoundError:
                now = None
            if now != before and (now is not None or not was_replaced(self._directory)):
                raise StorageError(
                    f"{path} was written to, or removed, while the checkpoint was read, which may hold values of two "
                    "saves: another job saves into the same directory; load it again when that save has ended"
                )

    def get(self, name: str) -> OpenFile:
        """Return the file, opened at the first call; it may be closed at any time (see :meth:`acquire`)."""
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self.open_unshared(name)
                self._used(file)
            return file

    def acquire(self, name: str) -> OpenFile:
        """Return the file, which stays open until the caller passes it to :meth:`release`."""
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self.open_unshared(name)
            if not file.is_open:
                with self._detect_replacement():
                    file.reopen()
            file.users += 1
            self._used(file)
            return file

    def release(self, file: OpenFile) -> None:
        """End the use of a file that :meth:`acquire` returned."""
        with self._lock:
            file.users -= 1
            if not file.users and self._files.get(file.name) is not file:  # close() was called during the use
                if self._open.get(file.name) is file:
                    del self._open[file.name]
                file.close()

    def close(self) -> None:
        """Close all files; one that is in use, at the end of its use: a closed number may become another file's."""
        with self._lock:
            for file in self._files.values():
                if not file.users:
                    file.close()
            self._files.clear()
            self._open.clear()

    def close_unused(self) -> bool:
        """Close the files that nobody uses; return whether there were any. No other thread's call is waited for."""
        if not self._lock.acquire(blocking=False):  # that thread may wait for a file of this one's reader
            return False
        try:
            unused = [name for name, file in self._open.items() if not file.users]
            for name in unused:
                self._open.pop(name).close()
            return bool(unused)
        finally:
            self._lock.release()

    def _read_table(self, record: FileRecord | PlainFile, algorithm: str) -> bytes:
        """Return the content of a record's table file, whose size is checked before memory is taken for it."""
        name = record.table_name
        path = self._directory / check_file_name(name)
        with self._detect_replacement():
            refuse_linked_folders(self._directory, name)
            with open_existing(path) as file:
                if file.size != record.segments or file.size > limit_table(record.size, algorithm):
                    raise CorruptCheckpointError(
                        f"the table of digests is damaged: it has {file.size} bytes, {record.segments} were written"
                    )
                return read_all(file)

    def _advise(self) -> str:
        """Return advice for files of other sizes than were recorded."""
        changed = 0
        for name, size in list_files((self._records or {}).values()).items():
            try:
                changed += file_size(self._directory / name) != size
            except (OSError, CheckpointingException):
                continue  # one that is missing is no sign of another save
            if changed > 1:  # a save of another library replaces the index and the data
                return (
                    "other files have other sizes, too. If another library has saved into this directory since, its "
                    f"checkpoint is read when {RECORD_NAME} is removed; else restore them, or load another checkpoint"
                )
        return "it was cut, or changed, since the save; restore it from a copy, or load another checkpoint"

    def _used(self, file: OpenFile) -> None:
        self._open.pop(file.name, None)
        self._open[file.name] = file
        if len(self._open) > OPEN_FILES:
            for name, idle in list(self._open.items())[:-OPEN_FILES]:
                if not idle.users:
                    idle.close()
                    del self._open[name]


_unpack_again = functools.lru_cache(16)(Segments.unpack)


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns

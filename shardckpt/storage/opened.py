"""The files of a checkpoint that are open for reading, few at a time however many there are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.manifest import RECORD_NAME
from shardckpt.storage.digest import Segments
from shardckpt.storage.directory import RelativePath, was_replaced
from shardckpt.storage.filesystem import check_file_name, close_file, open_existing, same_file, status

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.manifest import FileRecord

#: Files that a reader keeps open; more are opened again when they are read again.
OPEN_FILES = 64


class OpenFile:
    """A file open for reading.

    Args:
        path: The file.
        record: What was written, if that is known.
        algorithm: Of its digests, if they are to be checked.
    """

    def __init__(self, path: Path, record: FileRecord | None, algorithm: str | None) -> None:
        self.path = path
        self.name = path.name
        self.fd, self.size = open_existing(path)
        self.is_open = True
        self.users = 0
        self._status: os.stat_result | None = None
        self._record = record
        self._algorithm = algorithm
        self._segments: Segments | None = None
        if record is not None and self.size != record.size:
            self.close()
            raise CorruptCheckpointError(
                f"{path}: it has {self.size} bytes, {record.size} were written; if another library has saved into this "
                f"directory since, its checkpoint is read when {RECORD_NAME} is removed"
            )

    @property
    def segments(self) -> Segments | None:
        """Its table of digests, unpacked when it is first asked for; None if they are not checked."""
        if self._segments is None and self._record is not None and self._algorithm is not None:
            record = self._record
            try:
                self._segments = Segments.unpack(record.segments, record.digest, record.size, self._algorithm)
            except CorruptCheckpointError as exc:
                raise CorruptCheckpointError(f"{self.path}: {exc}") from exc
        return self._segments

    def open_again(self) -> None:
        """Open it after :meth:`pause`, if it is still the same."""
        fd, size = open_existing(self.path)
        if not same_file(self._status, status(fd)):
            close_file(fd)
            raise StorageError(
                f"{self.path}: it is not the file that was there when reading began: something has replaced the "
                "checkpoint meanwhile, load it again"
            )
        if size != self.size:
            close_file(fd)
            raise CorruptCheckpointError(
                f"{self.path}: it had {self.size} bytes and has {size}: something writes to it"
            )
        self.fd, self.is_open = fd, True

    def pause(self) -> None:
        """Close it for now."""
        self._status = status(self.fd)
        self.close()

    def close(self) -> None:
        """Close it."""
        if self.is_open:
            self.is_open = False
            close_file(self.fd)


class OpenFiles:
    """Files by name, those not used for longest closed where too many are open; for several threads.

    Args:
        directory: Where they are.
        records: What was written, by name; None if that is not known.
        algorithm: Of their digests, if they are to be checked.
        detect_replacement: A context in which files are opened: it raises CheckpointReplacedError in the place of an
            error, if another save has replaced the checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        records: dict[str, FileRecord] | None,
        algorithm: str | None,
        detect_replacement: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._directory = directory
        self._records = records
        self._algorithm = algorithm
        self._detect_replacement = detect_replacement
        #: (size, time of writing) of files of which nothing else says what was written, when they were first opened.
        self._stamps: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._files: dict[str, OpenFile] = {}
        #: Those that are open, the last used one last.
        self._open: dict[str, OpenFile] = {}

    def opened(self, name: str) -> OpenFile:
        """The file, opened for the caller alone, who closes it."""
        path = self._directory / check_file_name(name)
        record = None if self._records is None else self._records.get(name)
        if self._records is not None and record is None:
            raise CorruptCheckpointError(f"{path} is asked for and not one of the files of the checkpoint")
        with self._detect_replacement():
            file = OpenFile(path, record, self._algorithm)
        if record is None and isinstance(path, RelativePath) and (found := status(file.fd)) is not None:
            self._stamps.setdefault(name, _stamp(found))
        return file

    def check_unchanged(self) -> None:
        """Raise if something has written to a file, of which there is no record, since it was first opened.

        Other libraries save into the directory that they overwrite. (In a directory that was replaced since, files
        only disappear.)

        Raises:
            StorageError: it names the file.
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
        """The file, opened when it is first asked for."""
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self.opened(name)
                self._used(file)
            return file

    def acquire(self, name: str) -> OpenFile:
        """The file, which stays open until it is released."""
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self.opened(name)
            if not file.is_open:
                with self._detect_replacement():
                    file.open_again()
            file.users += 1
            self._used(file)
            return file

    def release(self, file: OpenFile) -> None:
        """What :meth:`acquire` has returned is not read any more."""
        with self._lock:
            file.users -= 1
            if not file.users and self._files.get(file.name) is not file:  # close() came before
                if self._open.get(file.name) is file:
                    del self._open[file.name]
                file.close()

    def close(self) -> None:
        """Close all files; one that is being read, as soon as it is not."""
        with self._lock:
            for file in self._files.values():
                if not file.users:
                    file.close()
            self._files.clear()
            self._open.clear()

    def _used(self, file: OpenFile) -> None:
        self._open.pop(file.name, None)
        self._open[file.name] = file
        if len(self._open) > OPEN_FILES:
            for name, idle in list(self._open.items())[:-OPEN_FILES]:
                if not idle.users:
                    idle.pause()
                    del self._open[name]


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


__all__ = ["OPEN_FILES", "OpenFile", "OpenFiles"]

"""The part of an interrupted write that another process resumes: a journal in the staging directory.

Each line says up to where a file is written, and has the digests since the line before. The page cache survives a
killed process, so nothing is fsynced for the journal: it is of use only while the system that wrote it runs.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import StorageError
from shardckpt.storage.filesystem import open_new, wrap_os_errors, write_all

if TYPE_CHECKING:
    from collections.abc import Callable

#: The journal's name in a staging directory.
JOURNAL_NAME = ".journal"
#: Bytes between two lines about a file. Each line waits until all that was appended is written.
NOTE_BYTES = 64 << 20
_HEX = 8


class FileProgress(NamedTuple):
    """The written part of a file.

    Attributes:
        position: Bytes from the beginning of the file.
        records: Number of records that they are.
        digest: Digest of the sizes, names and small contents of these records.
        lengths: Bytes of each segment.
        digests: Digest of each segment.
    """

    position: int
    records: int
    digest: str
    lengths: list[int]
    digests: list[int]

    def extend(self, more: FileProgress) -> FileProgress:
        """Return this with the segments of a later line."""
        return more._replace(lengths=self.lengths + more.lengths, digests=self.digests + more.digests)


class Journal:
    """The journal of one write. :meth:`begin` or :meth:`resume` comes first.

    Its identity says what is written from what: a journal of another one is not continued. ``collect`` returns what
    else a line keeps, as JSON: what the caller has learned since the line before.
    """

    def __init__(self, identity: str, collect: Callable[[], Any]) -> None:
        self._identity = identity
        self._collect = collect
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0
        #: The staging directory, once there is one.
        self.folder: Path | None = None
        #: What an earlier process has written of each file.
        self.files: dict[str, FileProgress] = {}
        #: What ``collect`` has returned for each line of the earlier process.
        self.collected: list[Any] = []
        #: Whether what is written now is not what the earlier process was writing.
        self.has_diverged = False

    @property
    def nbytes(self) -> int:
        """Bytes that an earlier process has written."""
        return sum(file.position for file in self.files.values())

    def begin(self, folder: Path) -> None:
        """Create the journal in a new staging directory."""
        self.folder = folder
        self._fd = open_new(folder / JOURNAL_NAME)
        self._write({"identity": self._identity})

    def resume(self, folder: Path) -> bool:
        """Go on with a staging directory that another process has left; return whether it is of the same identity.

        If not, nothing is changed. This process owns the directory now. Files that the journal does not name are
        removed.
        """
        path = folder / JOURNAL_NAME
        lines, size = _read_lines(path)
        if not lines or lines[0].get("identity") != self._identity:
            return False
        files: dict[str, FileProgress] = {}
        for line in lines[1:]:
            progress = FileProgress(*line["progress"])
            before = files.get(line["file"])
            files[line["file"]] = before.extend(progress) if before else progress
        if not _cut_files(folder, files):
            return False
        self.files, self.collected = files, [line["collected"] for line in lines[1:]]
        with wrap_os_errors("open", path):
            os.truncate(path, size)  # without a line that was cut by the kill
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.folder, self._size = folder, size
        return True

    def note(self, file: str, progress: FileProgress) -> None:
        """Add a line: a file is written up to a position. Any thread may call this."""
        with self._lock:
            self._write({"file": file, "progress": progress, "collected": self._collect()})

    def diverge(self, path: Path) -> StorageError:
        """Return the error for a file whose earlier process has written something else."""
        self.has_diverged = True
        return StorageError(
            f"{path}: what an interrupted run has left is damaged, or does not belong to what is written now"
        )

    def end(self) -> None:
        """Remove the journal: all files are complete."""
        self.close()
        if self.folder is not None:
            path = self.folder / JOURNAL_NAME
            with wrap_os_errors("remove", path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close it; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line).encode()
        data = b"%08x %b\n" % (zlib.crc32(text), text)
        path = (self.folder or Path()) / JOURNAL_NAME
        write_all(self._fd, path, memoryview(data), self._size)
        self._size += len(data)


def _cut_files(folder: Path, files: dict[str, FileProgress]) -> bool:
    """Remove unknown files, and cut the others to what is known; return whether all are there."""
    for path in [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]:
        name = path.relative_to(folder).as_posix()
        with wrap_os_errors("remove", path):
            if name not in files and name != JOURNAL_NAME:
                path.unlink()
    for name, progress in files.items():
        path = folder / name
        with wrap_os_errors("cut", path):
            if not path.is_file() or path.stat().st_size < progress.position:
                return False
            os.truncate(path, progress.position)
    return True


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of a journal, and their bytes."""
    lines: list[dict[str, Any]] = []
    size = 0
    try:
        data = path.read_bytes()
    except OSError:  # it was killed before there was one, or another process has taken it
        return lines, size
    for raw in data.splitlines(keepends=True):
        text = raw[_HEX + 1 : -1]
        if not raw.endswith(b"\n") or raw[:_HEX] != b"%08x" % zlib.crc32(text):
            break
        lines.append(json.loads(text))
        size += len(raw)
    return lines, size

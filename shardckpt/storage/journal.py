"""A journal next to the files of a write, by which another process resumes the write if this one is killed.

Each line says up to where a file is written, and has the digests since the line before. The page cache survives a
killed process, so nothing is fsynced for the journal: it is of use only while the system that wrote it runs. Of an
object there is one line, when the store has all of it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import StorageError
from shardckpt.storage.abilities import find_ability, has_local_files
from shardckpt.storage.journal_log import open_log
from shardckpt.storage.places import remove_file
from shardckpt.storage.remote import HasFolders
from shardckpt.storage.store_abilities import ReplacesObjects, StreamsWrites

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.storage.journal_log import JournalLog

#: Bytes between two lines about a file. Each line waits until all that was appended is written.
NOTE_BYTES = 64 << 20


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

    Its identity names the target and the sources of the write: a journal with another identity is not continued.
    ``collect`` returns further content of a line, as JSON: the results that the caller has got since the line before.
    """

    def __init__(self, identity: str, collect: Callable[[], Any]) -> None:
        self._identity = identity
        self._collect = collect
        self._lock = threading.Lock()
        self._log: JournalLog | None = None
        self._folder = Path()
        #: The progress of an earlier process, by file.
        self.files: dict[str, FileProgress] = {}
        #: The results of ``collect`` in the lines of the earlier process.
        self.collected: list[Any] = []
        #: Whether the bytes that are written now differ from the earlier process's.
        self.has_diverged = False

    @property
    def nbytes(self) -> int:
        """Bytes that an earlier process has written."""
        return sum(file.position for file in self.files.values())

    def begin(self, folder: Path) -> None:
        """Begin the journal of a new staging directory, or of a folder on a store."""
        self._folder, self._log = folder, open_log(folder)
        self._log.begin()
        self._log.append({"identity": self._identity})

    def resume(self, folder: Path) -> bool:
        """Go on with a folder that another process has left; return whether it is of the same identity.

        If not, nothing is changed. This process owns the folder now. Files in a directory that the journal does not
        name are removed.
        """
        log = open_log(folder)
        lines = log.read()
        if not lines or lines[0].get("identity") != self._identity:
            return False
        files: dict[str, FileProgress] = {}
        for line in lines[1:]:
            progress = FileProgress(*line["progress"])
            before = files.get(line["file"])
            files[line["file"]] = before.extend(progress) if before else progress
        if not log.go_on({name: progress.position for name, progress in files.items()}):
            return False
        self._folder, self._log = folder, log
        self.files, self.collected = files, [line["collected"] for line in lines[1:]]
        return True

    def note(self, file: str, progress: FileProgress) -> None:
        """Add a line: a file is written up to a position. Any thread may call this."""
        with self._lock:
            if self._log is not None:
                self._log.append({"file": file, "progress": progress, "collected": self._collect()})

    def diverge(self, path: Path) -> StorageError:
        """Return the error for a file whose earlier process has written something else."""
        self.has_diverged = True
        return StorageError(
            f"{path}: the file that an interrupted run has left is damaged, or has another content than is written now"
        )

    @property
    def names(self) -> list[str]:
        """The names of its files in the folder."""
        return [] if self._log is None else self._log.names

    def end(self) -> None:
        """Remove the journal of a directory: all files are complete. On a store it goes with the marker of the save."""
        self.close()
        for name in self.names:
            remove_file(self._folder / name)

    def close(self) -> None:
        """Close it; may be called twice."""
        if self._log is not None:
            self._log.close()


def can_resume(place: Path) -> bool:
    """Return whether another process may go on with the files of a killed one at a place.

    Where a store cannot replace an object on a condition, two processes could go on with the same.
    """
    needed: tuple[Callable[..., Any], ...] = (StreamsWrites, ReplacesObjects, HasFolders)
    return has_local_files(place) or all(find_ability(place, ability) is not None for ability in needed)

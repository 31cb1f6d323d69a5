"""Write a checkpoint's files so that another process can go on after this one is killed: records are replayed.

The strategy appends the same records again. Those that are in the file already are not produced: what is read from the
source, and written, begins where the journal ends.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from shardckpt.storage.digest import SMALL_RECORD, digest_function
from shardckpt.storage.file_writer import FileWriter
from shardckpt.storage.filesystem import make_folders
from shardckpt.storage.input_file import open_existing
from shardckpt.storage.journal import NOTE_BYTES, FileProgress
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.tensors import LARGE, PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from shardckpt.manifest import FileRecord
    from shardckpt.storage.file_writer import Produce
    from shardckpt.storage.journal import Journal
    from shardckpt.storage.stream import FileStream, WriterPool

_NOTHING = FileProgress(0, 0, "", [], [])
_DIGEST_BYTES = 16


class ResumableFile(FileWriter):
    """A file whose first records an earlier process may have written.

    The journal has what is written already, and gets what is written now.
    """

    _stream: FileStream

    def __init__(
        self, directory: Path, name: str, pool: WriterPool, algorithm: str, nbytes: int, journal: Journal
    ) -> None:
        self._journal = journal
        self._done = journal.files.get(name, _NOTHING)
        self._check_written(directory / name, algorithm)
        super().__init__(directory, name, pool, algorithm, nbytes, exists=name in journal.files)
        self._records = 0
        self._described = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        #: Bytes and segments that the journal has.
        self._noted, self._noted_segments = self._done.position, len(self._done.lengths)
        if self._done.position:
            self._stream.resume(self._done.lengths, self._done.digests, self._read_tail())

    def describe(self, content: Callable[[], str]) -> None:
        """Say what the records hold; see the base."""
        self._described.update(content().encode())

    def append(
        self,
        nbytes: int,
        produce: Produce,
        keys: int = 1,
        what: str = "",
        release: Callable[[], None] | None = None,
    ) -> int:
        """Append a record unless it is there; see the base."""
        offset = self._replay(nbytes, keys, what)
        if offset is None:
            offset = super().append(nbytes, produce, keys, what, release)
            self._note()
        return offset

    def append_small(self, parts: Iterable[bytes | memoryview], keys: int = 1, what: str = "") -> int:
        """Append a record unless it is there; see the base."""
        data = b"".join(parts)
        self._described.update(data)
        if len(data) > SMALL_RECORD:
            return self.append(len(data), lambda: [memoryview(data)], keys, what)
        offset = self._replay(len(data), keys, what)
        if offset is None:
            offset = super().append_small((data,), keys, what)
            self._note()
        return offset

    def append_each(self, records: Sequence[bytes | memoryview], whats: Sequence[str]) -> None:
        """Append small records unless they are there; see the base."""
        for record, what in zip(records, whats, strict=True):
            self.append_small((record,), what=what)

    def end(self) -> None:
        """Write the last block; see the base."""
        if self._records < self._done.records:
            raise self._journal.diverge(self._path)
        super().end()

    def close(self, rank: int) -> FileRecord:
        """Complete the file; see the base."""
        record = super().close(rank)
        if self._noted < self.position:
            self._write_note()
        return record

    def _check_written(self, path: Path, algorithm: str) -> None:
        """Raise, so that all is written anew, unless what an earlier process has written has its digests."""
        if not self._done.position:
            return
        digest = digest_function(algorithm)
        memory = memoryview(bytearray(max(self._done.lengths)))
        with open_existing(path) as file:
            start = 0
            for length, expected in zip(self._done.lengths, self._done.digests, strict=True):
                file.read_into(memory[:length], start)
                if digest(memory[:length]) != expected:
                    raise self._journal.diverge(path)
                start += length

    def _replay(self, nbytes: int, keys: int, what: str) -> int | None:
        """Return the offset of the next record if it is in the file already, else None."""
        self._described.update(f"{nbytes} {what}\n".encode())
        self._records += 1
        if self._records > self._done.records:
            return None
        offset = self._reserve_offset(nbytes, keys)
        is_last = self._records == self._done.records
        if is_last and (self.position, self._described.hexdigest()) != (self._done.position, self._done.digest):
            raise self._journal.diverge(self._path)
        return offset

    def _note(self) -> None:
        if self.position - self._noted >= NOTE_BYTES:
            self._stream.drain()
            self._write_note()

    def _write_note(self) -> None:
        lengths, digests = self._stream.segments(self._noted_segments)
        described = self._described.hexdigest()
        self._journal.note(self._name, FileProgress(self.position, self._records, described, lengths, digests))
        self._noted, self._noted_segments = self.position, self._noted_segments + len(lengths)

    def _read_tail(self) -> bytes:
        """Return the last bytes that are written, if they do not fill a page: the next ones join them."""
        tail = bytearray(self._done.position % PAGE)
        with open_existing(self._path) as file:
            file.read_into(memoryview(tail), self._done.position - len(tail))
        return bytes(tail)


class ResumableWriter(CheckpointWriter):
    """Writes files that another process can complete; small ones are written anew."""

    def __init__(self, directory: Path, journal: Journal, **kwargs: Any) -> None:
        super().__init__(directory, 0, **kwargs)
        self._journal = journal

    def create(self, name: str, nbytes: int = 0) -> FileWriter:
        """Create a file, or go on with it; see the base."""
        if nbytes < LARGE:
            return super().create(name, nbytes)
        self._check_name(name)
        make_folders(self.directory, name)
        writer = ResumableFile(self.directory, name, self._pool, self._algorithm, nbytes, self._journal)
        self._open[name] = writer
        return writer

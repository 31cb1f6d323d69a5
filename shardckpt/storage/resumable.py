"""Write files that another process can complete after a kill, by replaying their records.

The strategy appends the same records again. Those that the journal has are neither produced nor written: reading the
source, too, begins where the journal ends.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.storage.digest import SMALL_RECORD, digest_function
from shardckpt.storage.file_writer import FileWriter
from shardckpt.storage.input_file import open_existing
from shardckpt.storage.journal import NOTE_BYTES, FileProgress
from shardckpt.storage.object_stream import SentObject
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.tensors.memory import LARGE, PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from shardckpt.manifest.models import FileRecord
    from shardckpt.storage.file_writer import Produce
    from shardckpt.storage.journal import Journal
    from shardckpt.storage.store_abilities import StreamsWrites
    from shardckpt.storage.stream import FileStream, WriterPool

_NOTHING = FileProgress(0, 0, "", [], [])
_DIGEST_BYTES = 16


class ReplayedFile(FileWriter):
    """A file whose first records an earlier process may have written.

    ``done`` is the progress of this file that the journal has; further progress is noted there.
    """

    def __init__(
        self, journal: Journal, done: FileProgress, directory: Path, name: str, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(directory, name, *arguments, **options)
        self._journal = journal
        self._done = done
        self._records = 0
        self._described = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        #: Bytes and segments that the journal has.
        self._noted, self._noted_segments = done.position, len(done.lengths)

    def describe(self, content: Callable[[], str]) -> None:
        """Describe the records; see the base."""
        self._describe(content())

    def append(
        self,
        nbytes: int,
        produce: Produce,
        keys: int = 1,
        what: str = "",
        release: Callable[[], None] | None = None,
    ) -> int:
        """Append a record unless it is written already; see the base."""
        offset = self._replay(nbytes, keys, what)
        if offset is None:
            offset = super().append(nbytes, produce, keys, what, release)
            self._note()
        return offset

    def append_small(self, parts: Iterable[bytes | memoryview], keys: int = 1, what: str = "") -> int:
        """Append a record unless it is written already; see the base."""
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
        """Append small records unless they are written already; see the base."""
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

    def _describe(self, text: str) -> None:
        # a key may be text that UTF-8 has not: pickles, and so torch.save's files, hold it
        self._described.update(text.encode(errors="surrogatepass"))

    def _replay(self, nbytes: int, keys: int, what: str) -> int | None:
        """Return the offset of the next record if it is in the file already, else None."""
        self._describe(f"{nbytes} {what}\n")
        self._records += 1
        if self._records > self._done.records:
            return None
        offset = self._reserve_offset(nbytes, keys)
        is_last = self._records == self._done.records
        if is_last and (self.position, self._described.hexdigest()) != (self._done.position, self._done.digest):
            raise self._journal.diverge(self._path)
        return offset

    def _note(self) -> None:
        """Note the progress, where bytes outlive the process before the file is complete."""

    def _write_note(self) -> None:
        lengths, digests = self._stream.segments(self._noted_segments)
        described = self._described.hexdigest()
        self._journal.note(self._name, FileProgress(self.position, self._records, described, lengths, digests))
        self._noted, self._noted_segments = self.position, self._noted_segments + len(lengths)


class ResumableFile(ReplayedFile):
    """A file on a disk, which another process continues after the last note."""

    _stream: FileStream

    def __init__(
        self, journal: Journal, directory: Path, name: str, pool: WriterPool, algorithm: str, nbytes: int
    ) -> None:
        done = journal.files.get(name, _NOTHING)
        if done.position:
            _check_written(journal, done, directory / name, algorithm)
        super().__init__(journal, done, directory, name, pool, algorithm, nbytes, exists=name in journal.files)
        if done.position:
            self._stream.resume(done.lengths, done.digests, self._read_tail())

    def _note(self) -> None:
        if self.position - self._noted >= NOTE_BYTES:
            self._stream.drain()
            self._write_note()

    def _read_tail(self) -> bytes:
        """Return the written bytes of the last page unless it is full: direct writes write whole pages."""
        tail = bytearray(self._done.position % PAGE)
        with open_existing(self._path) as file:
            file.read_into(memoryview(tail), self._done.position - len(tail))
        return bytes(tail)


class ResumableObject(ReplayedFile):
    """An object of a store: only a complete one outlives the process, and is not sent again."""

    def __init__(
        self, journal: Journal, directory: Path, name: str, pool: WriterPool, algorithm: str, **options: Any
    ) -> None:
        done = journal.files.get(name, _NOTHING)
        refuse = partial(journal.diverge, directory / name)
        sent = SentObject(done.lengths, done.digests, algorithm, refuse) if done.position else None
        super().__init__(journal, done, directory, name, pool, algorithm, sent=sent, **options)


def _check_written(journal: Journal, done: FileProgress, path: Path, algorithm: str) -> None:
    """Compare the bytes of an earlier process with their digests; raise if they differ: all is written anew then."""
    digest = digest_function(algorithm)
    memory = memoryview(bytearray(max(done.lengths)))
    with open_existing(path) as file:
        start = 0
        for length, expected in zip(done.lengths, done.digests, strict=True):
            file.read_into(memory[:length], start)
            if digest(memory[:length]) != expected:
                raise journal.diverge(path)
            start += length


class ResumableWriter(CheckpointWriter):
    """Writes files that another process can complete; small ones are written anew."""

    def __init__(self, journal: Journal, directory: Path, rank: int = 0, **options: Any) -> None:
        super().__init__(directory, rank, **options)
        self._journal = journal

    def _open_file(self, name: str, nbytes: int, store: StreamsWrites | None, part_bytes: int) -> FileWriter:
        """Open a file, or go on with it; see the base."""
        if nbytes < LARGE:
            return super()._open_file(name, nbytes, store, part_bytes)
        common = self._journal, self.directory, name, self._pool, self._algorithm
        if store is None:
            return ResumableFile(*common, nbytes)
        return ResumableObject(*common, store=store, part_bytes=part_bytes)

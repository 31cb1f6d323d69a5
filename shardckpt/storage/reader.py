"""Reading a checkpoint's files: only those that belong to it, only inside its directory, checked against digests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt import settings
from shardckpt.errors import CheckpointingException, CheckpointReplacedError, CorruptCheckpointError
from shardckpt.manifest import RECORD_NAME
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.buffers import BufferPool
from shardckpt.storage.digest import MAX_SEGMENT, Digest, digest_function
from shardckpt.storage.directory import real_path, replaced_error, was_replaced
from shardckpt.storage.filesystem import check_file_name, is_there, read_into
from shardckpt.storage.identity import OpenedSave
from shardckpt.storage.opened import OPEN_FILES, OpenFile, OpenFiles
from shardckpt.storage.spans import Elements, Span, batches, cut
from shardckpt.storage.workers import Workers
from shardckpt.tensors import unfilled_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from shardckpt.manifest import Manifest

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Takes bytes of a file, from an offset on; may return a function that waits until their memory is free again.
Take = Callable[[int, memoryview], "Callable[[], None] | None"]

#: Bytes of a request to a store, and of a block of a file on one.
BLOCK_BYTES = 4 * MAX_SEGMENT
#: Bytes that one call reads, so that they are still in the processor's cache when they are checked and copied.
_READ_BYTES = 1 << 20
#: As many of them are a piece that goes through a buffer: what Python does for a piece costs as much as copying half.
_PIECE_READS = 2
#: Bytes that a thread takes at a time.
_BATCH_BYTES = 8 << 20
#: Smaller items are read by the calling thread: handing them over costs more than reading them.
_WORTH_A_THREAD = 256 << 10
#: Less than this is read by the calling thread alone.
_WORTH_THREADS = 32 << 20
_ALIGNED = 64


class CheckpointReader:
    """The files of one checkpoint, for one operation; a context manager.

    Args:
        directory: The checkpoint; of one that :func:`~shardckpt.storage.directory.open_directory` holds open, what is
            read is of one save.
        manifest: What its JSON files say.
        verify: Whether to check digests where there are any; by default as ``SHARDCKPT_VERIFY_READS`` says.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, verify: bool | None = None) -> None:
        self.directory = real_path(directory)
        self.manifest = manifest
        #: The directory, held open if it is a local one.
        self.place = directory
        record = manifest.record
        self._records = None if record is None else {file.name: file for file in record.files}
        verify = settings.verify_reads() if verify is None else verify
        algorithm = record.digest_algorithm if record is not None and verify else None
        if algorithm is not None:
            try:
                self._digest: Digest = digest_function(algorithm)
            except CheckpointingException as exc:
                raise type(exc)(f"{directory / RECORD_NAME}: {exc}") from exc
        self._has_digests = algorithm is not None
        self._save = OpenedSave(directory, manifest)
        self._files = OpenFiles(directory, self._records, algorithm, self._save.detect_replacement)
        self._by_requests = not has_local_files(directory)
        self._request_bytes = BLOCK_BYTES if self._by_requests else _READ_BYTES
        self._piece_bytes = BLOCK_BYTES if self._by_requests else _PIECE_READS * _READ_BYTES
        self._block_bytes = max(self._request_bytes, MAX_SEGMENT)
        self._buffers = BufferPool(self._piece_bytes + _ALIGNED)
        self._parsed: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Whether the file belongs to the checkpoint."""
        if self._records is not None and name in self._records:
            return True
        path = self.place / check_file_name(name)
        found = is_there(path)
        if found and self._records is not None:
            raise CorruptCheckpointError(f"{path} is there and {RECORD_NAME} does not name it: one of them is damaged")
        if not found and self._records is None and was_replaced(self.place):
            raise replaced_error(self.directory, f"it is not known whether {name} was there")
        return found

    def was_replaced(self) -> bool:
        """Whether another save, or none, is where the checkpoint was; of a local one, if it is held open."""
        return self._save.was_replaced()

    def check_unchanged(self) -> None:
        """Raise if what was read may be of two saves; called at the end of a load.

        What digests were checked of, and what a local save wrote whose directory is held open, is of one save anyway.

        Raises:
            CheckpointReplacedError: on a store, there is another save now.
            StorageError: another library has written to a file that was read.
        """
        if self._by_requests and not self._has_digests and self.was_replaced():
            raise replaced_error(self.directory, "nothing tells whether all that was read is of one save")
        self._files.check_unchanged()

    def open_files(self, names: Collection[str]) -> None:
        """Open files now, if they are few: what is open can be read whatever replaces the checkpoint then.

        One that cannot be opened is left for whoever reads it to report.

        Raises:
            CheckpointReplacedError: another save has replaced the checkpoint already.
        """
        for name in names if len(names) < OPEN_FILES else ():
            try:
                self.size(name)
            except CheckpointReplacedError:  # noqa: PERF203 - of files, few
                raise
            except CheckpointingException:
                continue

    def size(self, name: str) -> int:
        """Bytes of the file."""
        return self._files.get(name).size

    def read(self, name: str) -> bytes:
        """The whole file."""
        return self.read_range(name, 0, self.size(name), "the file")

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Bytes of a range; ``what`` (a key) is named in errors."""
        file = self._files.acquire(name)
        try:
            _check_range(file, offset, nbytes, what)
            data, view = unfilled_bytes(nbytes)
            self._fill(file, offset, view, what)
        finally:
            self._files.release(file)
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fill writable memory from the range that begins at ``offset``; what is large is shared among threads."""
        file = self._files.acquire(name)
        try:
            _check_range(file, offset, buffer.nbytes, what)
            self._fill(file, offset, buffer.cast("B"), what)
        finally:
            self._files.release(file)

    def read_pieces(
        self,
        name: str,
        elements: Elements,
        ranges: Iterable[tuple[int, int]],
        take: Take,
        what: str,
        *,
        pinned: bool = False,
    ) -> None:
        """Read ranges of a file piece by piece through memory of the reader's; no byte is read twice.

        Args:
            name: The file.
            elements: Where whole elements lie: each piece is of such.
            ranges: (start, stop) of what is wanted of them, ascending and apart from each other; pieces may hold more.
            take: Called for every piece, by several threads at a time, in any order.
            what: A key, named in errors.
            pinned: Whether a CUDA device shall copy from the memory behind the host's back.
        """
        file = self._files.acquire(name)
        try:
            _check_range(file, elements.start, elements.stop - elements.start, what)

            def pieces(batch: list[Span]) -> None:
                self._deliver(file, batch, elements, take, what, pinned=pinned)

            self._share(pieces, cut(file.segments, ranges, self._piece_bytes, elements))
        finally:
            self._files.release(file)

    def blocks(self, name: str) -> Iterator[memoryview]:
        """The whole file in order, in blocks whose digests are checked; a block holds until the next is asked for.

        The file is open only meanwhile, so that there may be more files than descriptors.
        """
        file = self._files.opened(name)
        try:
            buffer = memoryview(bytearray(min(file.size, self._block_bytes)))
            for span in cut(file.segments, [(0, file.size)], self._block_bytes, Elements(0, file.size)):
                block = buffer[: span.stop - span.start]
                self._read(file, span, block, name)
                yield block
        finally:
            file.close()

    def parsed(self, name: str, parse: Callable[[], _T]) -> _T:
        """``parse()``, done once in the life of this reader and kept under ``name``."""
        if name not in self._parsed:
            self._parsed[name] = parse()
        return self._parsed[name]  # type: ignore[no-any-return]

    def map(self, function: Callable[[_T], _R], items: Sequence[_T], size: Callable[[_T], int]) -> list[_R]:
        """``function`` of every item: large ones by the file threads, small ones by this thread first.

        What is on a store is read by all threads, for each request waits. A thread that finds no item any more helps
        with the pieces of the large ones that others still read.

        After the first failure, or an interrupt, nothing more is begun; of several failures the first item's is raised.

        Args:
            function: Reads an item.
            items: What to read, in the order of the results.
            size: Bytes of an item that are read.
        """
        sizes = [size(item) for item in items]
        least, enough = (0, 0) if self._by_requests else (_WORTH_A_THREAD, _WORTH_THREADS)
        large = [n for n, nbytes in enumerate(sizes) if nbytes >= least]
        if not large or sum(sizes[n] for n in large) < enough:
            return [function(item) for item in items]
        small = ((n, items[n]) for n, nbytes in enumerate(sizes) if nbytes < least)
        results = self._workers.each(function, ((n, items[n]) for n in large), small)
        return [results[n] for n in range(len(items))]

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def _workers(self) -> Workers:
        threads = settings.remote_threads() if self._by_requests else settings.io_threads()
        return Workers(threads, "shardckpt-read")

    def _share(self, function: Callable[[list[Span]], None], spans: Iterator[Span]) -> None:
        """``function`` of all spans in batches, by all threads if there are several batches."""
        found = batches(spans, _BATCH_BYTES)
        first, second = next(found, None), next(found, None)
        if first is None:
            return
        if second is None:
            function(first)
        else:
            self._workers.each(function, enumerate(chain((first, second), found)))

    def _fill(self, file: OpenFile, offset: int, buffer: memoryview, what: str) -> None:
        stop = offset + buffer.nbytes

        def fill(some: Iterable[Span]) -> None:
            for span in some:
                if offset <= span.start and span.stop <= stop:
                    self._read(file, span, buffer[span.start - offset : span.stop - offset], what)
                else:
                    self._read_part(file, span, offset, buffer, what)

        spans = cut(file.segments, ((offset, stop),), self._request_bytes, Elements(offset, stop))
        if buffer.nbytes <= _BATCH_BYTES:
            fill(spans)
        else:
            self._share(fill, spans)

    def _read_part(self, file: OpenFile, span: Span, offset: int, target: memoryview, what: str) -> None:
        """Read a span of which not all bytes are for memory that is filled from ``offset`` on."""
        low, high = max(span.start, offset), min(span.stop, offset + target.nbytes)
        with self._buffers.acquired(span.stop - span.start) as buffer:
            self._read(file, span, buffer[: span.stop - span.start], what)
            target[low - offset : high - offset] = buffer[low - span.start : high - span.start]

    def _deliver(
        self, file: OpenFile, batch: list[Span], elements: Elements, take: Take, what: str, *, pinned: bool
    ) -> None:
        """Read spans one by one into a buffer, or into two in turn where what takes them needs time for it."""
        nbytes = max(span.stop - span.start for span in batch) + _ALIGNED
        acquired = partial(self._buffers.acquired, nbytes, pinned=pinned)
        with acquired() as one, acquired() as other:
            ring = deque((one, other))
            wait: Callable[[], None] | None = None
            try:
                for span in batch:
                    position, memory = self._piece(file, span, elements, ring[0], what)
                    before, wait = wait, take(position, memory)
                    if before is not None:
                        before()
                    if wait is not None:
                        ring.rotate()
            finally:
                if wait is not None:
                    wait()

    def _piece(
        self, file: OpenFile, span: Span, elements: Elements, buffer: memoryview, what: str
    ) -> tuple[int, memoryview]:
        """The whole elements in a span, read into a buffer so that they are aligned there."""
        low, high = elements.within(span.start, span.stop)
        skip = (span.start - low) % _ALIGNED
        memory = buffer[skip : skip + span.stop - span.start]
        self._read(file, span, memory, what)
        return low, memory[low - span.start : max(low, high) - span.start]

    def _read(self, file: OpenFile, span: Span, memory: memoryview, what: str) -> None:
        """Fill memory with a span, and check it."""
        try:
            read_into(file.fd, file.path, memory, span.start)
            for start, stop, digest in span.segments:
                if self._digest(memory[start - span.start : stop - span.start]) != digest:
                    raise CorruptCheckpointError(
                        f"bytes {start} to {stop} of {file.path} are not those that were written (digest differs)"
                    )
        except CheckpointingException as exc:
            with self._save.detect_replacement():
                raise type(exc)(f"{what}: {exc}") from exc


def _check_range(file: OpenFile, offset: int, nbytes: int, what: str) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > file.size:
        raise CorruptCheckpointError(
            f"{what}: bytes {offset} to {offset + nbytes} are outside {file.path} of {file.size} bytes"
        )


__all__ = ["BLOCK_BYTES", "OPEN_FILES", "CheckpointReader", "Elements", "Take"]

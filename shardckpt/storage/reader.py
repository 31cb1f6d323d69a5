"""Read a checkpoint's files: only files that its record names, only inside its directory, checked against digests."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from itertools import chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from shardckpt import settings
from shardckpt.errors import CheckpointingException, CheckpointReplacedError, CorruptCheckpointError
from shardckpt.manifest.names import RECORD_NAME, TABLE_SUFFIX, find_folders
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.buffers import BLOCK_BYTES, BufferPool, block_pool
from shardckpt.storage.digest import MAX_SEGMENT, Digest, JoinedDigest, digest_functions
from shardckpt.storage.directory import detect_replacement, real_path, replaced_error, was_replaced
from shardckpt.storage.filesystem import check_file_name, is_there
from shardckpt.storage.identity import is_gone
from shardckpt.storage.input_file import read_joined
from shardckpt.storage.memory_budget import plan_reading
from shardckpt.storage.open_files import OPEN_FILES, OpenFile, OpenFiles
from shardckpt.storage.range_reads import RangeRead, batch_ranges, fill_gaps, split_pieces
from shardckpt.storage.read_ends import ReadEnds
from shardckpt.storage.spans import ElementRange, Pieces, Span, cut_spans
from shardckpt.storage.workers import Workers
from shardckpt.tensors.memory import unfilled_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from typing_extensions import Self

    from shardckpt.manifest.models import Manifest
    from shardckpt.storage.digest import Segments
    from shardckpt.storage.spans import Segment

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Called with an offset in the file and the bytes there; may return a function that waits until the caller may reuse
#: the memory of the bytes (a copy from pinned memory to a CUDA device has not ended when the call returns).
Take = Callable[[int, memoryview], "Callable[[], None] | None"]

#: Which CRC-32 of archives a reader compares.
Crcs = Literal["none", "entire", "parts"]

#: Bytes that one read call asks for: few enough to be in the processor's cache when they are checked and copied.
_READ_BYTES = 1 << 20
#: Bytes that one read call asks for where they go to their place, and nothing checks them.
_UNCHECKED_BYTES = 4 << 20
#: Read calls per piece that goes through a buffer: Python's overhead for a piece equals a copy of half a piece.
_PIECE_READS = 2
#: Bytes that a thread takes from the queue at a time.
_BATCH_BYTES = 8 << 20
#: Bytes. Fewer of :meth:`CheckpointReader.read_ranges` are read by the calling thread: to start another takes as long.
_WORTH_A_START = 8 << 20
#: Bytes. Smaller items are read by the calling thread: to hand one to another thread costs more than to read it.
_WORTH_A_THREAD = 256 << 10
#: Bytes. If all large items together have fewer, the calling thread reads everything.
_WORTH_THREADS = 32 << 20
#: Elements begin at multiples of this in a buffer: enough for every dtype.
_ALIGNED = 64


class CheckpointReader:
    """Reads the files of one checkpoint, for one load or command; a context manager.

    **Threads.** Any number of threads may call any method at a time, also from functions that :meth:`map` and
    :meth:`read_pieces` call; :meth:`close` waits for none: a file in use is closed when its use ends. An iterator of
    :meth:`blocks` belongs to one thread. A reader cannot be pickled: a worker process opens its own.

    **Caching.** No bytes of files are kept, but with ``kept_bytes``: each call reads, and checks digests, again. Open
    files (the most recently used, if they are many), their tables of digests, and the values of :meth:`parsed` are kept
    until :meth:`close`. Small tables of digests are kept for later readers of the process, by their text.

    Args:
        directory: The checkpoint. If :func:`~shardckpt.storage.directory.open_directory` holds it open, everything that
            is read is of one save, even if another save replaces the directory during the load.
        manifest: The content of its JSON files.
        verify: Whether to check digests where there are any; by default as ``SHARDCKPT_VERIFY_READS`` says.
        kept_bytes: Bytes of checked segments, read from their beginning, that are kept for the read that goes
            on there: for one who reads files in many small ranges, in order. On this machine; 0: none.
        memory_budget: Bytes that may be in memory at a time besides the destinations, the returned bytes, the index and
            the tables of digests; None: as many as are fast.
        crcs: Which CRC-32 of archives are compared, where there are no digests: ``entire``, the default if digests are
            checked, for members that are read entirely; ``parts`` for all members that are read in part, too,
            whose rest is read for it; or ``none``.

    Attributes:
        directory: The checkpoint's real path, for errors.
        crcs: As given; ``none`` if the checkpoint has a record, whose digests are of all bytes.
        manifest: As given: ``manifest.save_id``, ``manifest.version``, ``manifest.record.files``.

    Raises:
        CheckpointingException: the digests need a package that is not installed.

    Example:
        >>> with CheckpointReader(directory, manifest) as reader:  # doctest: +SKIP
        ...     data = reader.read("common.json")
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        verify: bool | None = None,
        kept_bytes: int = 0,
        memory_budget: int | None = None,
        crcs: Crcs | None = None,
    ) -> None:
        self.directory = real_path(directory)
        self.manifest = manifest
        #: The directory, held open if it is on this machine.
        self.place = directory
        record = manifest.record
        # None: another library's checkpoint, which has no record; its index names its files
        self._records = None if record is None else {file.name: file for file in record.files}
        verify = settings.verify_reads() if verify is None else verify
        self.crcs: Crcs = "none" if record is not None else crcs or ("entire" if verify else "none")
        #: Called with the number of bytes that were compared with a CRC-32, by any thread.
        self.count_checked: Callable[[int], object] = _count_nothing
        self._crcs_checked: dict[str, bool] = {}
        algorithm = record.digest_algorithm if record is not None and verify else None
        if algorithm is not None:
            try:
                self._digest: Digest
                self._digest_joined: JoinedDigest
                self._digest, self._digest_joined = digest_functions(algorithm)
            except CheckpointingException as exc:
                raise type(exc)(f"{directory / RECORD_NAME}: {exc}") from exc
        self._has_digests = algorithm is not None
        # no method of this reader: the circle of references would keep the directory open until gc runs
        self._detect_replacement = partial(detect_replacement, self.directory, partial(is_gone, directory, manifest))
        self._files = OpenFiles(directory, self._records, algorithm, self._detect_replacement)
        self._by_requests = takes_requests(directory)
        self._limits = plan_reading(memory_budget, by_requests=self._by_requests)
        self._request_bytes = self._limits.request_bytes if self._by_requests else _READ_BYTES
        self._piece_bytes = self._limits.request_bytes if self._by_requests else _PIECE_READS * _READ_BYTES
        self._block_bytes = max(self._request_bytes, MAX_SEGMENT)
        self._buffers = BufferPool(self._piece_bytes + _ALIGNED)
        self._ends = ReadEnds(kept_bytes) if kept_bytes and self._has_digests and not self._by_requests else None
        self._parsed: dict[str, Any] = {}
        self._parsing: dict[str, AbstractContextManager[Any]] = {}

    def has(self, name: str) -> bool:
        """Return whether the file belongs to the checkpoint.

        Raises:
            CorruptCheckpointError: the directory has the file, and the checkpoint's record does not name it.
            CheckpointReplacedError: the checkpoint has no record, and another save has replaced it: the file may have
                been there.
            StorageError: the system does not say.
        """
        if self._records is not None and name in self._records:
            return True
        owner = (self._records or {}).get(name.removesuffix(TABLE_SUFFIX))
        if owner is not None and owner.table_name == name:
            return False  # the table of digests of another file, the reader's own: no strategy reads it
        path = self.place / check_file_name(name)
        found = is_there(path)
        if found and self._records is not None and name in find_folders(self._records):
            return False  # a folder of the checkpoint, not a file
        if found and self._records is not None:
            raise CorruptCheckpointError(f"{path} exists, but {RECORD_NAME} does not name it: one of them is damaged")
        if not found and self._records is None and was_replaced(self.place):
            raise replaced_error(self.directory, f"it is not known whether it had {name}")
        return found

    def was_replaced(self) -> bool:
        """Return whether the checkpoint was replaced or removed; of a local one that is not held open, always False.

        Raises:
            StorageError: the store does not answer.
        """
        return is_gone(self.place, self.manifest)

    def check_unchanged(self) -> None:
        """Raise an error if the read bytes may be of two saves; the core calls it at the end of each load.

        No check is needed where digests were checked, or where a local directory is held open: that is one save's.

        Raises:
            CheckpointReplacedError: another save has replaced the checkpoint on the store.
            StorageError: another library has written to a file that was read.
        """
        if self._by_requests and not self._has_digests and self.was_replaced():
            raise replaced_error(
                self.directory, "without digests it is not known whether everything that was read is of one save"
            )
        self._files.check_unchanged()

    def open_files(self, names: Collection[str]) -> None:
        """Open files now, if they are few: open files stay readable after another save replaces the checkpoint.

        A file that cannot be opened is no error here: the call that reads it raises.

        Raises:
            CheckpointReplacedError: another save has already replaced the checkpoint.
        """
        for name in names if len(names) < OPEN_FILES else ():
            try:
                _ = self._files.get(name).segments  # a table that stands in a file of its own is read now, too
            except CheckpointReplacedError:  # noqa: PERF203 - of files, few
                raise
            except CheckpointingException:
                continue

    def accept_cut_files(self) -> None:
        """Read files that are shorter than recorded, from now on: the bytes before their ends, against digests."""
        self._files.accepts_cut = True

    def size(self, name: str) -> int:
        """Return the size of the file in bytes.

        Raises:
            CorruptCheckpointError: the record does not name the file, or it has another size than recorded.
            StorageError: it cannot be opened.
        """
        return self._files.get(name).size

    def is_known(self, name: str, offset: int, data: bytes) -> bool:
        """Return whether the file has these bytes at an offset, as its digests say; nothing of the file is read.

        Args:
            name: The file.
            offset: Of the first byte.
            data: The expected bytes.

        Returns:
            True if a digest says so; False if they are others, or no digest is of these bytes alone.

        Raises:
            CorruptCheckpointError: as :meth:`size`.
        """
        segments = self._files.get(name).segments
        if segments is None:
            return False
        found = next(iter(segments.touching(offset, offset + 1)), None)
        return found is not None and found == (offset, offset + len(data), self._digest(data))

    def read(self, name: str, what: str = "") -> bytes:
        """Return all bytes of the file; errors name ``what``, by default the file.

        Raises:
            CorruptCheckpointError: as :meth:`size`, or a digest differs.
            StorageError: it cannot be opened or read.
        """
        return self.read_range(name, 0, self.size(name), what or name)

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Return ``nbytes`` bytes of the file from ``offset`` on; errors name ``what`` (a key).

        Raises:
            CorruptCheckpointError: the range is outside the file, or a digest differs.
        """
        file = self._files.acquire(name)
        try:
            _check_range(file, offset, nbytes, what)
            data, view = unfilled_bytes(nbytes)
            self._fill(file, offset, view, what)
        finally:
            self._files.release(file)
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fill writable memory from ``offset`` on, without a copy; several threads read a large range.

        Args:
            name: The file.
            offset: Of the first byte in the file.
            buffer: Filled completely, whatever its format.
            what: A name for the range in errors: a key.

        Raises:
            CorruptCheckpointError: the range is outside the file, or a digest differs.
        """
        memory = buffer.cast("B") if buffer.nbytes else memoryview(bytearray())  # no cast takes a shape with a 0
        self.read_ranges([RangeRead(name, offset, memory, what)])

    def read_parts(self, name: str, start: int, stop: int, parts: Sequence[tuple[int, memoryview]], what: str) -> bool:
        """Fill parts of memory, each with bytes of one range of a local file, by one call in this thread.

        Args:
            name: The file.
            start: Of the range, in the file.
            stop: Its end.
            parts: Where each part begins in the file, and its memory; in ascending order. With the gaps between them
                1,000 at most, for a system call takes no more.
            what: A name for the range in errors.

        Returns:
            Whether they are filled. If not, their bytes are undefined, and are to be read otherwise: two overlap, the
            file is on a store, or a digest differs.

        Raises:
            CorruptCheckpointError: the range is outside the file.
        """
        if self._by_requests or self._ends is not None:
            return False
        file = self._files.acquire(name)
        try:
            _check_range(file, start, stop - start, what)
            segments = [] if file.segments is None else [*file.segments.touching(start, stop)]
            if segments:  # the first and the last may reach beyond the range
                start, stop = segments[0][0], segments[-1][1]
            nbytes = stop - start
            with (block_pool if nbytes <= BLOCK_BYTES else self._buffers).acquired(nbytes) as spare:
                pieces = fill_gaps(parts, start, stop, spare)
                if pieces is None:
                    return False
                read_joined(file.input, pieces, start)
                pairs = zip(split_pieces(pieces, [high - low for low, high, _ in segments]), segments, strict=True)
                return all(self._digest_joined(group) == digest for group, (_, _, digest) in pairs)
        finally:
            self._files.release(file)

    def read_ranges(self, ranges: Sequence[RangeRead], meanwhile: Callable[[], object] | None = None) -> None:
        """Fill memory from many ranges, without a copy, by threads that do nothing but read and check digests.

        Args:
            ranges: The ranges; ranges of one file should follow each other, in ascending order.
            meanwhile: Called by the calling thread, which then helps the others.

        Raises:
            CorruptCheckpointError: a range is outside its file, or a digest differs.
        """
        # two threads that read small ones would wait for each other's lock; on a store all wait for the network
        least = 0 if self._by_requests else _WORTH_A_THREAD
        large = [found for found in ranges if found.memory.nbytes >= least]
        small = [found for found in ranges if found.memory.nbytes < least]
        total = sum(found.memory.nbytes for found in large)

        def read_own() -> None:
            self._fill_all(small)
            if meanwhile is not None:
                meanwhile()

        if total < _WORTH_A_START and not (self._by_requests and len(ranges) > 1):
            self._fill_all(large)
            read_own()
            return
        # on a store each range is a request
        most, least = (self._request_bytes,) * 2 if self._by_requests else (_BATCH_BYTES, _READ_BYTES)
        shares = 2 * self._limits.threads
        found = batch_ranges(large, self._find_segments, most, least, shares, joined=not self._by_requests)
        work: Iterator[tuple[int, Callable[[], object]]] = (
            (number, partial(self._fill_all, batch)) for number, batch in enumerate(found)
        )
        own = [(-1, read_own)] if small or meanwhile is not None else []
        self._workers.each(_call, work, own, nests=False)

    def _find_segments(self, found: RangeRead) -> Segments | None:
        file = self._files.get(found.file)
        _check_range(file, found.offset, found.memory.nbytes, found.what)
        return file.segments

    def _fill_all(self, ranges: Sequence[RangeRead]) -> None:
        """Fill memory from many ranges, in this thread; consecutive ranges of one file look it up once."""
        for name, some in groupby(ranges, _name_file):
            file = self._files.acquire(name)
            try:
                for _, offset, memory, what in some:
                    _check_range(file, offset, memory.nbytes, what)
                    self._fill(file, offset, memory, what)
            finally:
                self._files.release(file)

    def read_pieces(self, pieces: Pieces, take: Take) -> None:
        """Read ranges of a file in pieces, through the reader's own buffers; no byte is read twice.

        Args:
            pieces: The ranges.
            take: Called for every piece, by several threads at a time, in any order.

        Raises:
            CorruptCheckpointError: the elements reach beyond the file, or a digest differs.
        """
        elements, ranges = pieces.elements, pieces.ranges
        file = self._files.acquire(pieces.file)
        try:
            _check_range(file, elements.start, elements.stop - elements.start, pieces.what)

            last = None
            if self._ends is not None:
                ranges = list(ranges)
                if len(ranges) == 1:
                    ((start, last),) = ranges
                    start = self._take_end(self._ends, file, start, last, elements.unit, take)
                    ranges = [(start, last)] if start < last else []

            def deliver(batch: list[Span]) -> None:
                self._deliver(file, batch, pieces, take, last)

            self._share(deliver, cut_spans(file.segments, ranges, self._piece_bytes, elements))
        finally:
            self._files.release(file)

    def blocks(self, name: str) -> Iterator[memoryview]:
        """Return an iterator of all bytes of the file in order, in blocks whose digests are checked.

        A block is valid until the next one is requested: all share one buffer. The file is closed at the end, not kept
        open: a checkpoint may have more files than a process may have descriptors.
        """
        file = self._files.open_unshared(name)
        try:
            buffer = memoryview(bytearray(min(file.size, self._block_bytes)))
            for span in cut_spans(file.segments, [(0, file.size)], self._block_bytes, ElementRange(0, file.size)):
                block = buffer[: span.stop - span.start]
                self._read(file, span, block, name)
                yield block
        finally:
            file.close()

    def parsed(self, name: str, parse: Callable[[], _T]) -> _T:
        """Return ``parse()``, which is called once in the life of this reader and cached under ``name``.

        Other threads that ask for the same name meanwhile wait for it; an error is raised in the thread that called,
        and the next one calls again. All get the same object: do not change it.

        Args:
            name: The name of the value: its file, or any other text.
            parse: Makes the value; it may read, and ask for other names.

        Returns:
            The same value for each call with this name.
        """
        if name not in self._parsed:
            with self._parsing.setdefault(name, threading.RLock()):  # one each: parse() may ask for another name
                if name not in self._parsed:
                    with self._detect_replacement():  # content that contradicts itself may be of two saves
                        self._parsed[name] = parse()
        return self._parsed[name]  # type: ignore[no-any-return]

    def note_crcs(self, name: str, *, all_members: bool) -> None:
        """Note that an archive in the file was compared with the CRC-32 of all its members, or of some."""
        self._crcs_checked[name] = all_members and self._crcs_checked.get(name, True)

    def has_checked_crcs(self, name: str) -> bool:
        """Return whether all archives in the file were compared with the CRC-32 of each of their members."""
        return self._crcs_checked.get(name, False)

    def map(self, function: Callable[[_T], _R], items: Sequence[_T], size: Callable[[_T], int]) -> list[_R]:
        """Call a function on every item: the reader's threads read large items, the calling thread small ones first.

        On a store all threads read items of any size, because each request waits for the network. A thread that has no
        item left helps to read the pieces of the large ones.

        Args:
            function: Reads an item.
            items: The items.
            size: Returns how many bytes of an item are read.

        Returns:
            The results, in the order of the items.

        Raises:
            Exception: The function's error for the first item that failed; no item is begun after a failure.
        """
        sizes = [size(item) for item in items]
        least, enough = (0, 0) if self._by_requests else (_WORTH_A_THREAD, _WORTH_THREADS)
        large = [n for n, nbytes in enumerate(sizes) if nbytes >= least]
        if not large or sum(sizes[n] for n in large) < enough:
            return [function(item) for item in items]
        # the caller reads the small ones while threads read the large: then it helps with those
        small = ((n, items[n]) for n, nbytes in enumerate(sizes) if nbytes < least)
        results = self._workers.each(function, ((n, items[n]) for n in large), small)
        return [results[n] for n in range(len(items))]

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        if self._ends is not None:
            self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _workers(self) -> Workers:
        return Workers(self._limits.threads, "shardckpt-read")

    def _share(self, function: Callable[[list[Span]], None], spans: Iterator[Span]) -> None:
        """Call a function on all spans in batches, in all threads if there is more than one batch."""
        # many short spans cost time, not bytes
        found = batch_by_bytes(spans, lambda span: span.stop - span.start, _BATCH_BYTES, _BATCH_BYTES >> 12)
        first, second = next(found, None), next(found, None)
        if first is None:
            return
        if second is None:
            function(first)
        else:
            self._workers.each(function, enumerate(chain((first, second), found)), nests=False)

    def _fill(self, file: OpenFile, offset: int, buffer: memoryview, what: str) -> None:
        """Fill memory from one range, in this thread."""
        if self._ends is not None:
            count = self._ends.take(file.name, offset, buffer)
            offset, buffer = offset + count, buffer[count:]
            if not buffer.nbytes:
                return
        stop, segments = offset + buffer.nbytes, file.segments
        if segments is not None and not self._by_requests and self._ends is None:  # neither wants larger spans
            only = segments.find_only(offset, stop)  # most parts of a slice, and heads of archives, lie in one
            touched = list(segments.touching(offset, stop)) if only is None else [only]
            if len(touched) * _READ_BYTES <= stop - offset + 2 * _READ_BYTES:  # full ones, except at both ends
                self._fill_segments(file, touched, offset, buffer, what)
                return
        most = _UNCHECKED_BYTES if segments is None and not self._by_requests else self._request_bytes
        for span in cut_spans(segments, ((offset, stop),), most, ElementRange(offset, stop)):
            if offset <= span.start and span.stop <= stop:
                self._read(file, span, buffer[span.start - offset : span.stop - offset], what)
                continue
            # it reaches beyond the buffer, because a digest is of a full segment
            low, high, nbytes = max(span.start, offset), min(span.stop, stop), span.stop - span.start
            if self._ends is not None and high < span.stop and nbytes <= BLOCK_BYTES:
                self._read_and_keep(self._ends, file, span, buffer[low - offset : high - offset], low, what)
                continue
            if len(span.segments) == 1 and not self._by_requests:
                self._read_around(file, span, buffer[low - offset : high - offset], low, what)
                continue
            # the pages of the process's blocks are there already
            with (block_pool if nbytes <= BLOCK_BYTES else self._buffers).acquired(nbytes) as found:
                self._read(file, span, found[:nbytes], what)
                buffer[low - offset : high - offset] = found[low - span.start : high - span.start]

    def _fill_segments(
        self, file: OpenFile, segments: Sequence[Segment], offset: int, buffer: memoryview, what: str
    ) -> None:
        """Fill memory from an offset on with the bytes of segments, each by a call; those at the ends may be cut."""
        stop, fd, digest = offset + buffer.nbytes, file.input.fileno(), self._digest
        for segment in segments:
            low, high, expected = segment
            if low < offset or high > stop:
                first, last = max(low, offset), min(high, stop)
                self._read_around(
                    file, Span(low, high, (segment,)), buffer[first - offset : last - offset], first, what
                )
                continue
            memory = buffer[low - offset : high - offset]
            # Most slices come this way, and most bytes of older checkpoints. Between two segments the processor has no
            # code in its caches: so no more calls than these, if nothing is wrong.
            try:
                is_read = os.preadv(fd, [memory], low) == high - low
            except OSError:  # the call below raises it, or mends it
                is_read = False
            if not is_read or digest(memory) != expected:
                self._read(file, Span(low, high, (segment,)), memory, what)

    def _take_end(self, ends: ReadEnds, file: OpenFile, start: int, stop: int, unit: int, take: Take) -> int:
        """Deliver the kept bytes from the first byte of a range on; return where the rest begins."""
        with block_pool.acquired() as block:
            count = ends.take(file.name, start, block[: stop - start])
            if count % unit:  # it ends inside an element
                return start
            wait = take(start, block[:count]) if count else None
            if wait is not None:
                wait()
        return start + count

    def _deliver(self, file: OpenFile, batch: list[Span], pieces: Pieces, take: Take, last: int | None) -> None:
        """Read spans one by one into a buffer; into two in turn if ``take`` copies asynchronously.

        The bytes after ``last`` in a span are kept for the next read.
        """
        nbytes = max(span.stop - span.start for span in batch) + _ALIGNED
        acquired = partial(self._buffers.acquired, nbytes, pinned=pieces.pinned)
        with acquired() as one, acquired() as other:
            ring = deque((one, other))
            wait: Callable[[], None] | None = None
            try:
                for span in batch:
                    low, high = pieces.elements.within(span.start, span.stop)
                    skip = (span.start - low) % _ALIGNED  # so that the first element is at a multiple of it
                    memory = ring[0][skip : skip + span.stop - span.start]
                    self._read(file, span, memory, pieces.what)
                    if self._ends is not None and last is not None and span.start < last < span.stop:
                        self._keep_end(self._ends, file, last, memory[last - span.start :])
                    before, wait = wait, take(low, memory[low - span.start : max(low, high) - span.start])
                    if before is not None:  # the copy out of the other buffer ran while this span was read
                        before()
                    if wait is not None:
                        ring.rotate()
            finally:
                if wait is not None:  # after an error too: the device still copies out of the buffer
                    wait()

    def _read(self, file: OpenFile, span: Span, memory: memoryview, what: str) -> None:
        """Fill memory with a span, and check its digests."""
        try:
            file.input.read_into(memory, span.start)
            for start, stop, digest in span.segments:
                if self._digest(memory[start - span.start : stop - span.start]) != digest:
                    raise file.differs_error(start, stop)
        except CheckpointingException as exc:
            self._raise_named(exc, what)

    def _read_around(self, file: OpenFile, span: Span, memory: memoryview, offset: int, what: str) -> None:
        """Fill memory from an offset on with a part of a segment, and check the segment.

        Its other bytes go to a spare block, by the same call: nothing is copied.
        """
        before = offset - span.start
        after = span.stop - offset - memory.nbytes
        with (block_pool if before + after <= BLOCK_BYTES else self._buffers).acquired(before + after) as spare:
            pieces = [spare[:before], memory, spare[before : before + after]]
            try:
                read_joined(file.input, pieces, span.start)
                ((start, stop, digest),) = span.segments
                if self._digest_joined(pieces) != digest:
                    raise file.differs_error(start, stop)
            except CheckpointingException as exc:
                self._raise_named(exc, what)

    def _read_and_keep(
        self, ends: ReadEnds, file: OpenFile, span: Span, memory: memoryview, offset: int, what: str
    ) -> None:
        """Fill memory from an offset on with a part of a span, and keep the next bytes for the next read."""
        block = block_pool.acquire()
        low = offset - span.start
        high = low + memory.nbytes
        try:
            self._read(file, span, block.view[: span.stop - span.start], what)
            memory[:] = block.view[low:high]
        except BaseException:
            block_pool.release(block)
            raise
        ends.keep(file.name, offset + memory.nbytes, block, high, span.stop - span.start)

    def _keep_end(self, ends: ReadEnds, file: OpenFile, offset: int, memory: memoryview) -> None:
        """Keep a copy of the end of a span for the next read."""
        if memory.nbytes <= BLOCK_BYTES:
            block = block_pool.acquire()
            block.view[: memory.nbytes] = memory
            ends.keep(file.name, offset, block, 0, memory.nbytes)

    def _raise_named(self, error: CheckpointingException, what: str) -> NoReturn:
        """Raise an error of a read once more, with the key; or that the checkpoint was replaced, if it was."""
        with self._detect_replacement():
            raise type(error)(f"{what}: {error}") from error
        raise error  # unreachable: the block raises


_name_file = attrgetter("file")


def _count_nothing(_nbytes: int) -> None:
    """Count no bytes."""


def _call(function: Callable[[], object]) -> None:
    function()


def _check_range(file: OpenFile, offset: int, nbytes: int, what: str) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > file.size:
        raise CorruptCheckpointError(
            f"{what}: bytes {offset} to {offset + nbytes} are outside {file.path} of {file.size} bytes"
        )

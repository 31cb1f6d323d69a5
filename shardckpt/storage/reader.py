"""Reading a checkpoint's files: only those that belong to it, only inside its directory, checked against digests."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt import settings
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import RECORD_NAME
from shardckpt.storage.digest import ALGORITHM, SEGMENT_BYTES, Segments, checksum
from shardckpt.storage.filesystem import check_file_name, close_file, is_there, open_existing, read_into
from shardckpt.storage.remote import RemotePath
from shardckpt.storage.writer import WORTH_A_THREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from shardckpt.manifest import FileRecord, Manifest

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Where a segment begins and ends, and its digest.
_Segment = tuple[int, int, int]

#: Files that a reader keeps open; more are opened again when they are read again.
OPEN_FILES = 64
#: Largest piece in which a file is read as a whole.
BLOCK_BYTES = 4 * SEGMENT_BYTES


class _OpenFile:
    """A file open for reading, with its table of digests if there is one."""

    def __init__(self, path: Path, record: FileRecord | None, *, verify: bool) -> None:
        self.path = path
        self.fd, self.size = open_existing(path)
        self.is_open = True
        self.users = 0
        self.segments: Segments | None = None
        if record is None:
            return
        try:
            if self.size != record.size:
                raise CorruptCheckpointError(
                    f"it has {self.size} bytes, {record.size} were written; if another library has saved into this "
                    f"directory since, its checkpoint is read when {RECORD_NAME} is removed"
                )
            if verify:
                self.segments = Segments.unpack(record.segments, record.digest, record.size)
        except CorruptCheckpointError as exc:
            self.close()
            raise CorruptCheckpointError(f"{path}: {exc}") from exc

    def open(self) -> None:
        """Open it again."""
        if self.is_open:
            return
        self.fd, size = open_existing(self.path)
        self.is_open = True
        if size != self.size:
            raise CorruptCheckpointError(
                f"{self.path}: it had {self.size} bytes and has {size}: something writes to it"
            )

    def close(self) -> None:
        """Close it, for now or for good."""
        if self.is_open:
            self.is_open = False
            close_file(self.fd)


class CheckpointReader:
    """The files of one checkpoint, for one operation; a context manager.

    Args:
        directory: The checkpoint.
        manifest: What its JSON files say.
        verify: Whether to check digests where there are any; by default as ``SHARDCKPT_VERIFY_READS`` says.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, verify: bool | None = None) -> None:
        self.directory = directory
        self.manifest = manifest
        self._verify = settings.verify_reads() if verify is None else verify
        record = manifest.record
        self._records = None if record is None else {file.name: file for file in record.files}
        if record is not None and record.digest_algorithm != ALGORITHM and self._verify:
            raise CorruptCheckpointError(
                f"{directory / RECORD_NAME}: digests are {record.digest_algorithm!r}, this reader checks "
                f"{ALGORITHM!r}; a newer shardckpt reads them, or {settings.VERIFY_READS}=0 loads without checking"
            )
        self._lock = threading.Lock()
        self._files: dict[str, _OpenFile] = {}
        #: Those that are open, the last used one last.
        self._open: dict[str, _OpenFile] = {}
        self._parsed: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Whether the file belongs to the checkpoint."""
        path = self.directory / check_file_name(name)
        if self._records is None:
            return is_there(path)
        if name not in self._records and is_there(path):
            raise CorruptCheckpointError(f"{path} is there and {RECORD_NAME} does not name it: one of them is damaged")
        return name in self._records

    def size(self, name: str) -> int:
        """Bytes of the file."""
        return self._file(name).size

    def read(self, name: str) -> bytes:
        """The whole file."""
        return self.read_range(name, 0, self.size(name), "the file")

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Bytes of a range; ``what`` (a key) is named in errors."""
        file = self._file(name)
        _check_range(file, offset, nbytes, what)
        buffer = bytearray(nbytes)
        with self._in_use(file):
            self._fill(file, offset, memoryview(buffer), what)
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fill writable memory from the range that begins at ``offset``."""
        file = self._file(name)
        _check_range(file, offset, buffer.nbytes, what)
        with self._in_use(file):
            self._fill(file, offset, buffer.cast("B"), what)

    def blocks(self, name: str) -> Iterator[memoryview]:
        """The whole file in order, in blocks whose digests are checked; a block holds until the next is asked for.

        The file is open only meanwhile, so that there may be more files than descriptors.
        """
        file = self._opened(name)
        try:
            buffer = memoryview(bytearray(min(file.size, BLOCK_BYTES)))
            start = 0
            for stop in _block_ends(file):
                block = buffer[: stop - start]
                self._fill(file, start, block, name)
                yield block
                start = stop
        finally:
            file.close()

    def parsed(self, name: str, parse: Callable[[], _T]) -> _T:
        """``parse()``, done once in the life of this reader and kept under ``name``."""
        if name not in self._parsed:
            self._parsed[name] = parse()
        return self._parsed[name]  # type: ignore[no-any-return]

    def map(self, function: Callable[[_T], _R], items: Sequence[_T], size: Callable[[_T], int]) -> list[_R]:
        """``function`` of every item: large ones by the file threads, small ones by this thread meanwhile.

        What is on a store is read by threads alone, for each request waits.

        After the first failure, or an interrupt, nothing more is begun; of several failures the first item's is raised.

        Args:
            function: Reads an item.
            items: What to read, in the order of the results.
            size: Bytes of an item.
        """
        remote = isinstance(self.directory, RemotePath)
        threads, worth_a_thread = (settings.remote_threads(), 0) if remote else (settings.io_threads(), WORTH_A_THREAD)
        if threads == 1:
            return [function(item) for item in items]
        failed = threading.Event()
        pool = ThreadPoolExecutor(threads, "shardckpt-read")
        large: dict[int, Future[_R]] = {}
        small: dict[int, _R] = {}
        try:
            for n, item in enumerate(items):
                if size(item) >= worth_a_thread:
                    large[n] = pool.submit(_noting, failed, function, item)
            for n, item in enumerate(items):
                if n not in large and not failed.is_set():
                    small[n] = function(item)
            wait(large.values(), return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)
        if failed.is_set():
            raise next(exc for future in large.values() if not future.cancelled() and (exc := future.exception()))
        return [large[n].result() if n in large else small[n] for n in range(len(items))]

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, name: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self._opened(name)
                self._used(file)
            return file

    @contextmanager
    def _in_use(self, file: _OpenFile) -> Iterator[None]:
        """Keep a file open as long as it is read."""
        with self._lock:
            file.open()
            file.users += 1
            self._used(file)
        try:
            yield
        finally:
            with self._lock:
                file.users -= 1

    def _used(self, file: _OpenFile) -> None:
        """Note the last use of an open file; where too many are open, close those not used for longest."""
        self._open.pop(file.path.name, None)
        self._open[file.path.name] = file
        if len(self._open) > OPEN_FILES:
            for name, idle in list(self._open.items())[:-OPEN_FILES]:
                if not idle.users:
                    idle.close()
                    del self._open[name]

    def _opened(self, name: str) -> _OpenFile:
        path = self.directory / check_file_name(name)
        record = None if self._records is None else self._records.get(name)
        if self._records is not None and record is None:
            raise CorruptCheckpointError(f"{path} is asked for and not one of the files of the checkpoint")
        return _OpenFile(path, record, verify=self._verify)

    def _fill(self, file: _OpenFile, offset: int, buffer: memoryview, what: str) -> None:
        if file.segments is None:
            read_into(file.fd, file.path, buffer, offset)
            return
        stop = offset + buffer.nbytes
        for group in _requests(file, file.segments.touching(offset, stop)):
            first, last = group[0][0], group[-1][1]
            low, high = max(first, offset), min(last, stop)
            target = buffer[low - offset : high - offset]
            whole = target if high - low == last - first else memoryview(bytearray(last - first))
            read_into(file.fd, file.path, whole, first)
            for start, end, digest in group:
                if checksum(whole[start - first : end - first]) != digest:
                    raise CorruptCheckpointError(
                        f"{what}: bytes {start} to {end} of {file.path} are not those that were written (digest "
                        "differs)"
                    )
            if whole is not target:
                target[:] = whole[low - first : high - first]


def _requests(file: _OpenFile, segments: Iterable[_Segment]) -> Iterator[list[_Segment]]:
    """Segments that are read by one call: each by itself from a file, a block of them at most from a store."""
    most = BLOCK_BYTES if isinstance(file.path, RemotePath) else 0
    group: list[_Segment] = []
    for segment in segments:
        if group and segment[1] - group[0][0] > most:
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _block_ends(file: _OpenFile) -> Iterator[int]:
    """Where the blocks of a file end: with digests, where a segment ends, so that none is read twice."""
    if file.segments is None:
        yield from range(BLOCK_BYTES, file.size, BLOCK_BYTES)
    else:
        start = stop = 0
        for length in file.segments.lengths:
            if stop + length - start > BLOCK_BYTES:
                yield stop
                start = stop
            stop += length
    if file.size:
        yield file.size


def _noting(failed: threading.Event, function: Callable[[_T], _R], item: _T) -> _R:
    try:
        return function(item)
    except BaseException:
        failed.set()
        raise


def _check_range(file: _OpenFile, offset: int, nbytes: int, what: str) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > file.size:
        raise CorruptCheckpointError(
            f"{what}: bytes {offset} to {offset + nbytes} are outside {file.path} of {file.size} bytes"
        )


__all__ = ["CheckpointReader"]

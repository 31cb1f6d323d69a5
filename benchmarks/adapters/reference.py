"""The physical limit: two threads a rank that move bytes straight between memory and preallocated files."""

from __future__ import annotations

import errno
import mmap
import os
import platform
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from xxhash import xxh3_64_intdigest

from benchmarks.adapters.base import Adapter, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from benchmarks.state import State

_THREADS = 2
#: Bytes a system call.
_STEP = 16 << 20
#: Bytes that have one digest in a checkpoint of shardckpt.
_DIGESTED = 1 << 20


class _Span(NamedTuple):
    """Bytes ``offset`` to ``offset + len(view)`` of one thread's file, and their memory."""

    thread: int
    offset: int
    view: memoryview


class Buffered(Adapter):
    """Through the page cache; a background save copies into touched memory first."""

    flags: ClassVar[int] = 0
    syncs: ClassVar[str] = "both files of a rank"
    operations: ClassVar[frozenset[str]] = frozenset({"save", "load", "slice", "async"})

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS + 1)  # one more waits for a background save
        self._places: dict[str, int] = {}
        self._length = 0
        self._copy: mmap.mmap | None = None
        self._saving: Future[None] | None = None

    def can(self, operation: str, world: int) -> bool:
        """Slices where one rank has all."""
        return super().can(operation, world) and (operation != "slice" or world == 1)

    def version(self) -> str:
        """Of the kernel."""
        return platform.release()

    def save(self, described: State, path: Path) -> None:
        """Two halves of the memory, a file each."""
        self._places = {piece.key: piece.place for piece in described.pieces}
        self._length = len(described.memory)
        self._save(memoryview(described.memory), path)

    def load(self, described: State, path: Path) -> None:
        """The same way back; the rows of a slice from where they are."""
        view = memoryview(described.memory)
        if dist.get_world_size() > 1 or described.pieces[0].part.cells == 1:
            spans = [_Span(thread, 0, half) for thread, half in enumerate(_halves(view))]
        else:
            spans = list(self._rows(described, view))
        self._each(lambda thread: self._read([span for span in spans if span.thread == thread], path, thread))

    def start(self, described: State, path: Path) -> None:
        """Copy, and write in a thread."""
        if self._copy is None:
            self._copy = mmap.mmap(-1, len(described.memory), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        copy, memory = (torch.frombuffer(m, dtype=torch.uint8).chunk(_THREADS) for m in (self._copy, described.memory))
        self._each(lambda thread: copy[thread].copy_(memory[thread]))
        self._saving = self._pool.submit(self._save, memoryview(self._copy), path)

    def finish(self) -> None:
        """Wait for the thread."""
        if self._saving is not None:
            self._saving.result()
        self._saving = None

    def release(self) -> None:
        """Free the copy."""
        self._copy = None

    def _save(self, view: memoryview, path: Path) -> None:
        path.mkdir(exist_ok=True)
        halves = _halves(view)
        self._each(lambda thread: _write(path, thread, halves[thread], self.flags))

    def _read(self, spans: Sequence[_Span], path: Path, thread: int) -> None:
        _read(path, thread, spans, self.flags)

    def _rows(self, described: State, view: memoryview) -> Iterable[_Span]:
        """Where the rows of a slice's pieces are in the files, which have the memory's layout."""
        half = self._length // _THREADS
        for piece in described.pieces:
            start = self._places[piece.key] + piece.part.cell * piece.tensor.nbytes
            stop = start + piece.tensor.nbytes
            for thread in range(_THREADS):
                low, high = max(start, thread * half), min(stop, (thread + 1) * half)
                if low < high:
                    place = piece.place + low - start
                    yield _Span(thread, low - thread * half, view[place : place + high - low])

    def _each(self, work: Callable[[int], object]) -> None:
        for task in [self._pool.submit(work, thread) for thread in range(_THREADS)]:
            task.result()


class Direct(Buffered):
    """O_DIRECT, which needs aligned memory and offsets: no slices."""

    flags: ClassVar[int] = getattr(os, "O_DIRECT", 0)
    operations: ClassVar[frozenset[str]] = frozenset({"save", "load"})


class Digested(Buffered):
    """Through the page cache, a MiB at a time, with the digest of each taken at once: what checked reads cost at least.

    It compares nothing, and knows where all bytes are: a load with digests that does more than this is slower.
    """

    operations: ClassVar[frozenset[str]] = frozenset({"save", "load", "slice"})

    def _read(self, spans: Sequence[_Span], path: Path, thread: int) -> None:
        for span in spans:
            for start in range(0, len(span.view), _DIGESTED):
                piece = _Span(thread, span.offset + start, span.view[start : start + _DIGESTED])
                super()._read([piece], path, thread)
                xxh3_64_intdigest(piece.view)


def _halves(view: memoryview) -> list[memoryview]:
    half = len(view) // _THREADS
    return [view[thread * half : (thread + 1) * half] for thread in range(_THREADS)]


def _file(path: Path, thread: int) -> Path:
    return path / f"{dist.get_rank()}.{thread}.bin"


def _write(path: Path, thread: int, view: memoryview, flags: int) -> None:
    fd = _open(_file(path, thread), os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    try:
        os.posix_fallocate(fd, 0, len(view))
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done : done + _STEP], done)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, thread: int, spans: Sequence[_Span], flags: int) -> None:
    fd = _open(_file(path, thread), os.O_RDONLY | flags)
    try:
        for span in spans:
            done = 0
            while done < len(span.view):
                count = os.preadv(fd, [span.view[done : done + _STEP]], span.offset + done)
                if not count:
                    raise EOFError(f"{_file(path, thread)} ends at {span.offset + done}")
                done += count
    finally:
        os.close(fd)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise UnsupportedError(f"the file system of {path.parent} has no O_DIRECT") from None
        raise


__all__ = ["Buffered", "Digested", "Direct"]

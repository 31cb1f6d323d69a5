"""The bytes of a new file in their order: small parts joined into blocks, large ones cut into pieces, all digested.

A file is tiled by blocks and pieces that begin on pages, so that all of them may be written at the same time and past
the page cache. Blocks are of reused memory; pieces are written from where they are.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.storage.buffers import BLOCK_BYTES, block_pool
from shardckpt.storage.digest import CRC32, SEGMENT_BYTES, Segments, digest_function
from shardckpt.storage.new_file import DIRECT_BYTES, whole_pages
from shardckpt.tensors import LARGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from shardckpt.storage.buffers import Buffer
    from shardckpt.storage.new_file import NewFile

#: Parts from this size on are not joined with others; smaller ones are one segment.
LARGE_PART = LARGE
#: What one thread takes of a large part.
PIECE_BYTES = 4 << 20


class _Once:
    """A task that is done by whoever calls it first; who comes later waits until it is done."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task: Callable[[], None] | None = task
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            task, self._task = self._task, None
            if task is not None:
                task()


def start(pool: ThreadPoolExecutor, task: Callable[[], None]) -> Future[None] | None:
    """Let a thread do the task; where no thread may be had, do it now."""
    once = _Once(task)
    try:
        return pool.submit(once)
    except (RuntimeError, MemoryError):  # it is in the pool's queue all the same, and a thread may come to it
        once()
    return None


class WriterPool:
    """The threads that write, and what they may have in hand: one more than they are, of records and of blocks.

    The caller goes on while they write; where it waits for results, :class:`~shardckpt.storage.workers.Workers` share
    the work with it.

    Args:
        threads: How many; 1 is none, and the caller writes.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "shardckpt-write") if threads > 1 else None
        #: Of one thread each, for the files that have one of their own.
        self._own = [ThreadPoolExecutor(1, "shardckpt-write") for _ in range(threads)]
        self._files = [0] * threads
        #: Large records whose bytes exist.
        self.records = threading.Semaphore(threads + 1)
        #: Blocks that wait to be written.
        self.blocks = threading.Semaphore(threads + 1)

    def add_file(self) -> int:
        """Count a file that threads begin to write; return the number of its thread, for when one alone writes it."""
        number = self._files.index(min(self._files))
        self._files[number] += 1
        return number

    def remove_file(self, number: int) -> None:
        """Count a file with that number no more: it has ended."""
        self._files[number] -= 1

    def start(self, task: Callable[[], None], own: int | None = None) -> Future[None] | None:
        """Let a thread do the task, or do it now.

        Args:
            task: What to do.
            own: The number of a file into which the kernel lets one write at a time: where there are several files,
                its tasks are all done by the same thread, so that the others write into other files.
        """
        if self._pool is None:
            task()
            return None
        return start(self._pool if own is None or sum(self._files) == 1 else self._own[own], task)

    def close(self) -> None:
        """End the threads."""
        pools = [pool for pool in (self._pool, *self._own) if pool is not None]
        for pool in pools:  # all, before an interrupt may end the waiting
            pool.shutdown(wait=False)
        for pool in pools:
            pool.shutdown()


class _Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a part, to be digested; those of them on the part's whole pages, to be written.

    Attributes:
        part: The part.
        offset: Where it begins in the file.
        start: Where the piece begins in it.
        stop: Where it ends.
        segment: Number of its first segment in the table.
        what: What the part is (a key).
    """

    part: memoryview
    offset: int
    start: int
    stop: int
    segment: int
    what: str


class Countdown:
    """Calls ``release`` when it was counted down ``count`` times."""

    def __init__(self, count: int, release: Callable[[], None]) -> None:
        self._left = count
        self._release = release
        self._lock = threading.Lock()
        if not count:
            release()

    def count_down(self) -> None:
        """Count one down."""
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self._release()


class FileStream:
    """The content of a new file, put in order by one thread at a time.

    Args:
        file: The file.
        pool: The threads that write.
        algorithm: Of the digests; None for digests of 0, which nothing computes.
    """

    def __init__(self, file: NewFile, pool: WriterPool, algorithm: str | None) -> None:
        self._file = file
        self._pool = pool
        self._digest = _no_digest if algorithm is None else digest_function(algorithm)
        self._algorithm = algorithm or CRC32
        self._table = Segments(algorithm=self._algorithm)
        self._lengths, self._digests = self._table.lengths, self._table.digests
        #: Where the block begins in the file: on a page. All that comes before it is handed over.
        self._start = 0
        self._block: Buffer | None = None
        self._filled = 0
        self._room = 0
        #: The last key of which there are bytes in the block.
        self._what = ""
        self._tasks: list[Future[None]] = []
        self._stopped = False
        #: Its number in the pool, from when it is known to have work for threads.
        self._number = pool.add_file() if file.expected >= LARGE_PART else None
        #: What writing has failed with first.
        self.error: BaseException | None = None

    def put_small(self, data: bytes, what: str = "") -> None:
        """A record of at most ``SMALL_RECORD`` bytes; ``what`` as in :meth:`put`."""
        if data:
            self._what = what or self._what
            self._lengths.append(len(data))
            self._digests.append(self._digest(data))
            self._fill(data)

    def put(self, parts: list[memoryview], release: Callable[[], None], what: str = "") -> None:
        """A record of more than ``SMALL_RECORD`` bytes.

        Args:
            parts: Its bytes, which must stay as they are until they are written.
            release: Called when they are.
            what: What they are (a key), named in errors.
        """
        pieces: list[_Piece] = []
        self._what = what or self._what
        try:
            for part in parts:
                pieces += self._put_large(part, what) if part.nbytes >= LARGE_PART else self._put_medium(part)
        except BaseException:
            release()
            raise
        countdown = Countdown(len(pieces), release)
        for piece in pieces:
            self._hand_over(partial(self._write_piece, [piece]), countdown.count_down)

    def end(self) -> None:
        """No more comes: write what is left, or begin to."""
        if self.error is None and self._start:
            self._flush()
        elif self.error is None:
            self._flush_small()  # all that the file has

    def finish(self) -> Segments:
        """Wait until all is written and durable; the table of digests."""
        self.end()
        self._wait()
        if self.error is not None:
            raise self.error
        self._file.finish(self._start)
        return Segments(self._lengths, self._digests, self._algorithm)

    def fail(self, error: BaseException) -> None:
        """Give the file up."""
        self.error = self.error or error

    def stop(self) -> None:
        """Begin nothing more, and wait for what was begun."""
        self._stopped = True
        self._wait()
        number, self._number = self._number, None
        if number is not None:
            self._pool.remove_file(number)
        block, self._block, self._filled, self._room = self._block, None, 0, 0
        if block is not None:  # this no longer has it: released twice, it would be two files' at the same time
            block_pool.release(block)

    def _put_medium(self, part: memoryview) -> list[_Piece]:
        if part.nbytes:
            self._lengths.append(part.nbytes)
            self._digests.append(self._digest(part))
            self._fill(part)
        return []

    def _put_large(self, part: memoryview, what: str) -> list[_Piece]:
        """Place a large part: its ends on pages that it shares with others go into blocks."""
        offset, nbytes, segment = self._start + self._filled, part.nbytes, len(self._lengths)
        for start in range(0, nbytes, SEGMENT_BYTES):
            self._lengths.append(min(SEGMENT_BYTES, nbytes - start))
            self._digests.append(0)  # until its piece is written
        low, high = whole_pages(offset, nbytes)
        self._fill(part[:low])
        self._flush()
        self._start = offset + high
        self._fill(part[high:])
        self._file.reserve(offset + high)
        per_piece = PIECE_BYTES // SEGMENT_BYTES
        return [
            _Piece(part, offset, start, min(start + PIECE_BYTES, nbytes), segment + number * per_piece, what)
            for number, start in enumerate(range(0, nbytes, PIECE_BYTES))
        ]

    def _fill(self, data: bytes | memoryview) -> None:
        """Put bytes into the block, and into as many new ones as it takes."""
        end = self._filled + len(data)
        if end <= self._room and self._block is not None:
            self._block.view[self._filled : end] = data
            self._filled = end
        else:
            view = memoryview(data)
            while view.nbytes:
                view = view[self._fill_some(view) :]

    def _fill_some(self, view: memoryview) -> int:
        if self._block is None or self._filled == self._room:
            self._flush()
            self._block = self._block or block_pool.acquire()
            self._room = BLOCK_BYTES
        count = min(self._room - self._filled, view.nbytes)
        self._block.view[self._filled : self._filled + count] = view[:count]
        self._filled += count
        return count

    def _flush(self) -> None:
        """Hand the block over; it ends on a page, or the file ends with it."""
        if self._block is None or self._filled < DIRECT_BYTES:
            self._flush_small()
            return
        block, begin, filled = self._block, self._start, self._filled
        self._file.reserve(begin + filled)
        self._pool.blocks.acquire()
        self._block, self._start, self._filled, self._room = None, begin + filled, 0, 0
        write = partial(self._file.write, block.view[:filled], begin, self._named())
        self._hand_over(write, partial(self._free, block))

    def _flush_small(self) -> None:
        """Write what is in the block now."""
        if self._block is not None and self._filled:
            self._file.write(self._block.view[: self._filled], self._start, self._named())
            self._start, self._filled = self._start + self._filled, 0

    def _named(self) -> str:
        """What is in the block, for errors."""
        return self._what and f"{self._what} and what lies before it"

    def _free(self, block: Buffer) -> None:
        block_pool.release(block)
        self._pool.blocks.release()

    def _hand_over(self, task: Callable[[], None], ended: Callable[[], None]) -> None:
        if self._number is None:
            self._number = self._pool.add_file()
        found = self._pool.start(partial(self._do, task, ended), self._number if self._file.is_cached else None)
        if found is not None:
            self._tasks.append(found)

    def _do(self, task: Callable[[], None], ended: Callable[[], None]) -> None:
        """Do a task unless the file is given up."""
        try:
            if self.error is None and not self._stopped:
                task()
        except BaseException as exc:  # noqa: BLE001 - it is raised by the next record, or by finish()
            self.fail(exc)
        finally:
            ended()

    def _wait(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.exception()

    def _write_piece(self, hand: list[_Piece]) -> None:
        """Digest and write a piece: at once, or in steps that stay in the cache where the processor copies it.

        It is taken out of the hand that the pool still holds: when this returns nothing refers to the bytes.
        """
        part, offset, begin, end, segment, what = hand.pop()
        low, high = whole_pages(offset, part.nbytes)
        step = SEGMENT_BYTES if self._file.copies(part, offset) else PIECE_BYTES
        for start in range(begin, end, step):
            stop = min(start + step, end)
            for at in range(start, stop, SEGMENT_BYTES):
                number = segment + (at - begin) // SEGMENT_BYTES
                self._digests[number] = self._digest(part[at : min(at + SEGMENT_BYTES, stop)])
            first, last = low + start, min(low + stop, high)
            self._file.write(part[first:last], offset + first, what)


def _no_digest(_: memoryview | bytes) -> int:
    return 0


__all__ = ["LARGE_PART", "Countdown", "FileStream", "WriterPool", "start"]

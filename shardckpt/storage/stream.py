"""Cut the content of a new file into writes: small parts are joined into blocks, large ones cut into pieces.

Blocks and pieces begin on page boundaries of the file, so that several threads may write them in any order, and so that
direct writes (O_DIRECT) can take them. Blocks are copied into reused buffers; pieces are written from the caller's
memory without a copy.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.storage.buffers import BLOCK_BYTES, block_pool
from shardckpt.storage.digest import SEGMENT_BYTES, Segments, digest_function
from shardckpt.storage.new_file import DIRECT_BYTES, full_pages
from shardckpt.tensors.memory import LARGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from shardckpt.storage.buffers import Buffer
    from shardckpt.storage.new_file import NewFile

#: Bytes of a large part that one thread writes at a time.
PIECE_BYTES = 4 << 20
#: Bytes that are digested, and then written while they are in the processor's cache, where the system copies them.
_CACHED_BYTES = 1 << 20


class _OnceTask:
    """A task that the first call runs; other calls wait until it has ended."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task: Callable[[], None] | None = task
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            task, self._task = self._task, None
            if task is not None:
                task()


def start(pool: ThreadPoolExecutor, task: Callable[[], None]) -> Future[None] | None:
    """Submit a task; if the pool cannot start a thread, run the task now and return None."""
    once = _OnceTask(task)
    try:
        return pool.submit(once)
    except (RuntimeError, MemoryError):  # the task stays in the pool's queue, where a thread may take it: it runs once
        once()
    return None


class WriterPool:
    """The threads that write files, and the limits on unwritten data: ``threads + 1`` large records, as many blocks.

    The caller continues while they write; with one thread there is no pool, and the caller writes. (Where the caller
    waits for results instead, as in reading, :class:`~shardckpt.storage.workers.Workers` use its thread, too.) Each
    thread calls ``count`` with the number of bytes that it has written since the last call.
    """

    def __init__(self, threads: int, count: Callable[[int], None] | None = None) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(threads, "shardckpt-write") if threads > 1 else None
        #: Each has one thread, which does all cached writes of the files that are assigned to it.
        self._single_threads = [ThreadPoolExecutor(1, "shardckpt-write") for _ in range(threads)]
        #: Open files by the number of their thread.
        self._files = [0] * threads
        #: Limits the large records that are produced and not yet written.
        self.records = threading.Semaphore(threads + 1)
        #: Limits the blocks that are full and not yet written.
        self.blocks = threading.Semaphore(threads + 1)

    def add_file(self) -> int:
        """Assign a file to the thread with the fewest files; return the number of that thread, for :meth:`start`."""
        number = self._files.index(min(self._files))
        self._files[number] += 1
        return number

    def remove_file(self, number: int) -> None:
        """Note that a file of that thread has ended."""
        self._files[number] -= 1

    def start(self, task: Callable[[], None], thread: int | None = None) -> Future[None] | None:
        """Run a task in a thread, or now if there is none; return its Future, or None if it has run.

        A file that is written through the page cache passes the ``thread`` that :meth:`add_file` returned: the kernel
        allows one such write to a file at a time. If several files are open, one thread then does all its tasks, and
        the other threads write other files instead of waiting.
        """
        if self._pool is None:
            task()
            return None
        is_alone = sum(self._files) == 1
        return start(self._pool if thread is None or is_alone else self._single_threads[thread], task)

    def close(self) -> None:
        """End the threads."""
        pools = [pool for pool in (self._pool, *self._single_threads) if pool is not None]
        for pool in pools:  # before any wait, which an interrupt may end: no thread is left running
            pool.shutdown(wait=False)
        for pool in pools:
            pool.shutdown()


class _Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a part, to be digested; the bytes on full pages of the file are written."""

    part: memoryview
    offset: int  # of the part in the file, in bytes
    start: int
    stop: int
    segment: int  # index of the piece's first segment in the table
    what: str  # the part's name in errors: a key


class Countdown:
    """Calls ``release`` once, when it has been counted down ``count`` times by any threads."""

    def __init__(self, count: int, release: Callable[[], None]) -> None:
        self._left = count
        self._release = release
        self._lock = threading.Lock()
        if not count:
            release()

    def count_down(self) -> None:
        """Count down by one."""
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self._release()


class ContentStream(ABC):
    """The content of a new file or object, appended by one thread at a time: its segments, and their digests."""

    def __init__(self, algorithm: str) -> None:
        self._digest = digest_function(algorithm)
        self._algorithm = algorithm
        table = Segments(algorithm=self._algorithm)
        self._lengths, self._digests = table.lengths, table.digests
        #: The key of the last bytes, for errors.
        self._what = ""
        #: The first error; the file cannot be completed after it.
        self.error: BaseException | None = None
        #: Seconds that :meth:`finish` waited for fsync; a store has none.
        self.sync_seconds = 0.0

    def put_small(self, data: bytes | memoryview, what: str = "") -> None:
        """Append bytes as one segment, by a copy; ``what`` as in :meth:`put`."""
        if data:
            self._what = what or self._what
            self._lengths.append(len(data))
            self._digests.append(self._digest(data))
            self._fill(data)

    @abstractmethod
    def put(self, parts: list[memoryview], release: Callable[[], None], what: str = "") -> None:
        """Append a record of more than ``SMALL_RECORD`` bytes, which must not change until ``release`` is called.

        ``release`` is called once, when all parts are written or have failed. Errors name ``what`` (a key).
        """

    def segments(self, first: int) -> tuple[list[int], list[int]]:
        """Return the lengths and digests of the segments from a number on, once all appended bytes are written."""
        return self._lengths[first:].tolist(), self._digests[first:].tolist()

    def end(self) -> None:  # noqa: B027 - a complete file has nothing to write
        """Begin to write the last bytes; no record follows."""

    def finish(self) -> Segments:
        """Complete the file; return its table of digests, or raise the first error."""
        if self.error is not None:
            raise self.error
        return Segments(self._lengths, self._digests, self._algorithm)

    def fail(self, error: BaseException) -> None:
        """Note an error: the file cannot be completed."""
        self.error = self.error or error

    def stop(self) -> None:  # noqa: B027 - as above
        """Give the file up unless it is complete; may be called twice."""

    @abstractmethod
    def _fill(self, data: bytes | memoryview) -> None:
        """Take bytes whose digest is noted; they are copied before this returns."""


class FileStream(ContentStream):
    """The content of a new file that the pool writes."""

    def __init__(self, file: NewFile, pool: WriterPool, algorithm: str) -> None:
        super().__init__(algorithm)
        self._file = file
        self._pool = pool
        #: Offset of the current block in the file, a multiple of the page size. All bytes before it are with the pool.
        self._start = 0
        self._block: Buffer | None = None
        self._filled = 0
        self._tasks: list[Future[None]] = []
        self._stopped = False
        #: The thread that the pool has assigned; None until the file is known to be large enough for threads.
        self._thread = pool.add_file() if file.expected >= LARGE else None

    def resume(self, lengths: Iterable[int], digests: Iterable[int], tail: bytes) -> None:
        """Continue after the bytes of another process: its segments, and the last bytes from a page boundary on."""
        self._lengths.extend(lengths)
        self._digests.extend(digests)
        self._start = sum(self._lengths) - len(tail)
        self._fill(tail)

    def drain(self) -> None:
        """Wait until all that was appended is in the file, or raise the first error of any write."""
        self._wait()
        if self.error is None and self._block is not None and self._filled:
            # the block stays, and is written once more when it is full: it must begin and end on page boundaries
            self._file.write(self._block.view[: self._filled], self._start, self._describe_block())
        if self.error is not None:
            raise self.error

    def put(self, parts: list[memoryview], release: Callable[[], None], what: str = "") -> None:
        """Append a record; see the base."""
        pieces: list[_Piece] = []
        self._what = what or self._what
        try:
            for part in parts:
                if part.nbytes >= LARGE:
                    pieces += self._put_large(part, what)
                else:
                    self.put_small(part)
        except BaseException:
            release()
            raise
        countdown = Countdown(len(pieces), release)
        for piece in pieces:
            self._hand_over(partial(self._write_piece, [piece]), countdown.count_down)

    def end(self) -> None:
        """Write the last block, or hand it to the pool; no record follows."""
        if self.error is None and self._start:
            self._flush()
        elif self.error is None:
            self._flush_small()  # the file is one block: a small file needs no thread

    def finish(self) -> Segments:
        """Wait until the file is written and fsynced; see the base."""
        self.end()
        self._wait()
        if self.error is None:
            started = time.perf_counter()
            self._file.finish(self._start)
            self.sync_seconds = time.perf_counter() - started
        return super().finish()

    def stop(self) -> None:
        """Skip the tasks that have not begun, and wait for those in progress; may be called twice."""
        self._stopped = True
        self._wait()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._pool.remove_file(thread)
        block, self._block, self._filled = self._block, None, 0
        if block is not None:  # dropped from self first: released twice, two files would get the same buffer
            block_pool.release(block)

    def _put_large(self, part: memoryview, what: str) -> list[_Piece]:
        """Cut a large part into pieces; copy its first and last partial pages, which other parts share, into blocks."""
        offset, nbytes, segment = self._start + self._filled, part.nbytes, len(self._lengths)
        for start in range(0, nbytes, SEGMENT_BYTES):
            self._lengths.append(min(SEGMENT_BYTES, nbytes - start))
            self._digests.append(0)  # set by the thread that writes its piece
        # no page has two writers: a direct write of one would overwrite the other thread's bytes in it
        low, high = full_pages(offset, nbytes)
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
        """Copy bytes into the block, and into new blocks as it fills."""
        end = self._filled + len(data)
        if end <= BLOCK_BYTES and self._block is not None:
            self._block.view[self._filled : end] = data
            self._filled = end
            return
        view = memoryview(data)
        while view.nbytes:
            if self._block is None or self._filled == BLOCK_BYTES:
                self._flush()
                self._block = self._block or block_pool.acquire()
            count = min(BLOCK_BYTES - self._filled, view.nbytes)
            self._block.view[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]

    def _flush(self) -> None:
        """Hand the block to the pool; it ends on a page boundary or at the end of the file."""
        if self._block is None or self._filled < DIRECT_BYTES:
            self._flush_small()
            return
        block, begin, filled = self._block, self._start, self._filled
        self._file.reserve(begin + filled)
        self._pool.blocks.acquire()
        self._block, self._start, self._filled = None, begin + filled, 0
        write = partial(self._file.write, block.view[:filled], begin, self._describe_block())
        self._hand_over(write, partial(self._free, block))

    def _flush_small(self) -> None:
        """Write the block in this thread, and keep its buffer: to hand few bytes over costs more."""
        if self._block is not None and self._filled:
            self._file.write(self._block.view[: self._filled], self._start, self._describe_block())
            self._start, self._filled = self._start + self._filled, 0

    def _describe_block(self) -> str:
        return self._what and f"{self._what} and the bytes before it"

    def _free(self, block: Buffer) -> None:
        block_pool.release(block)
        self._pool.blocks.release()

    def _hand_over(self, task: Callable[[], None], ended: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = self._pool.add_file()
        future = self._pool.start(partial(self._run, task, ended), self._thread if self._file.is_cached else None)
        if future is not None:
            self._tasks.append(future)

    def _run(self, task: Callable[[], None], ended: Callable[[], None]) -> None:
        """Run a task unless the file has failed or is stopped."""
        try:
            if self.error is None and not self._stopped:
                task()
        except BaseException as exc:  # noqa: BLE001 - the next record raises it, or finish()
            self.fail(exc)
        finally:
            ended()

    def _wait(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.exception()

    def _write_piece(self, holder: list[_Piece]) -> None:
        """Digest and write the one piece in a list: at once, or in steps for the processor's cache if it is copied."""
        # popped from the list, which the pool still refers to: when this returns nothing refers to the caller's memory
        part, offset, begin, end, segment, what = holder.pop()
        low, high = full_pages(offset, part.nbytes)
        step = _CACHED_BYTES if self._file.copies(part, offset) else PIECE_BYTES
        for start in range(begin, end, step):
            stop = min(start + step, end)
            for position in range(start, stop, SEGMENT_BYTES):
                number = segment + (position - begin) // SEGMENT_BYTES
                self._digests[number] = self._digest(part[position : min(position + SEGMENT_BYTES, stop)])
            first, last = low + start, min(low + stop, high)
            self._file.write(part[first:last], offset + first, what)

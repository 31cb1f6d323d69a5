"""A file that several ranks write, each to ranges of its own; the records of their parts become the file's record."""

from __future__ import annotations

import time
from array import array
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from shardckpt.errors import StorageError
from shardckpt.storage.digest import SEGMENT_BYTES, Segments, digest_function
from shardckpt.storage.new_file import NewFile
from shardckpt.storage.staged_files import FilePart, make_record
from shardckpt.storage.stream import PIECE_BYTES, Countdown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from shardckpt.manifest.models import FileRecord
    from shardckpt.storage.stream import WriterPool


class SharedFile:
    """A file of known size that this rank writes ranges of; :meth:`CheckpointWriter.share` makes it.

    No page of the file may have bytes of two ranks: on network file systems a client writes entire pages.

    Args:
        directory: The staging directory.
        name: The file's name. Whichever rank comes first creates the file.
        size: Bytes of the entire file, the same on every rank.
        pool: The threads that write.
        algorithm: Name of the digest algorithm.
    """

    def __init__(self, directory: Path, name: str, size: int, pool: WriterPool, algorithm: str) -> None:
        self.name = name
        self.size = size
        self._pool = pool
        self._digest = digest_function(algorithm)
        self._file = NewFile(directory / name, size, shared=True, count=pool.count)
        try:
            # before any write: with the space allocated, ranks write at the same time, and no write extends the file
            self._file.reserve_all()
        except BaseException:
            self._file.close()
            raise
        self._number = pool.add_file()
        self._tasks: list[Future[None]] = []
        table = Segments(algorithm=algorithm)
        self._starts, self._lengths, self._digests = array("Q"), table.lengths, table.digests
        self._keys = 0
        self._error: BaseException | None = None
        self._stopped = False
        #: Seconds that :meth:`finish` waited for fsync.
        self.sync_seconds = 0.0

    def write(
        self, offset: int, produce: Callable[[], memoryview], lengths: Sequence[int], keys: int = 0, what: str = ""
    ) -> None:
        """Write a range of the file.

        Args:
            offset: Where it begins.
            produce: Returns its bytes, which must not change until :meth:`CheckpointWriter.finish_part` returns; called
                once, when the threads may hold one more range.
            lengths: The segments of the range, in bytes, each at most ``SEGMENT_BYTES``.
            keys: How many stored items are counted with it, for reports.
            what: A name for the range in errors: a key.

        Raises:
            Exception: The error of an earlier write.
        """
        if self._error is not None:
            raise self._error
        self._keys += keys
        self._pool.records.acquire()
        try:
            view = produce().cast("B")
            if view.nbytes != sum(lengths):
                raise StorageError(f"{self.name}: {what} has {view.nbytes} bytes, and {sum(lengths)} were planned")
        except BaseException:
            self._pool.records.release()
            raise
        number = len(self._lengths)
        groups = _group_segments(lengths)
        countdown = Countdown(len(groups), self._pool.records.release)
        low = 0
        for group in groups:
            for start, length in zip(accumulate(group, initial=offset + low), group, strict=False):
                self._starts.append(start)
                self._lengths.append(length)
                self._digests.append(0)
            high, last = low + sum(group), number + len(group)
            run = partial(self._run, [view[low:high]], offset + low, range(number, last), what, countdown)
            task = self._pool.start(run, self._number if self._file.is_cached else None)
            if task is not None:
                self._tasks.append(task)
            low, number = high, last

    def finish(self, rank: int) -> FilePart:
        """Wait for all writes, and fsync the file.

        Returns:
            This rank's part.

        Raises:
            Exception: The error of a write.
        """
        try:
            self._wait()
            if self._error is not None:
                raise self._error
            started = time.perf_counter()
            self._file.finish(self.size)
            self.sync_seconds = time.perf_counter() - started
        finally:
            self.stop()
        return FilePart(self.name, self.size, rank, self._keys, self._starts, self._lengths, self._digests)

    def stop(self) -> None:
        """Wait until no thread uses the descriptors, and close them; may be called twice."""
        if self._stopped:
            return
        self._stopped = True
        self._wait()
        self._pool.remove_file(self._number)
        self._file.close()

    def _wait(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.exception()

    def _run(self, views: list[memoryview], offset: int, segments: range, what: str, countdown: Countdown) -> None:
        """Write the view in the list, and store the digests of its segments, whose numbers are ``segments``."""
        view = views.pop()  # so that nothing refers to the caller's memory when this ends
        try:
            if self._error is None and not self._stopped:
                low = 0
                for number in segments:
                    high = low + self._lengths[number]
                    self._digests[number] = self._digest(view[low:high])
                    low = high
                self._file.write(view, offset, what)
        except BaseException as exc:  # noqa: BLE001 - finish() raises it
            self._error = self._error or exc
        finally:
            del view
            countdown.count_down()


def cut_segments(nbytes: int) -> list[int]:
    """Return the lengths of the segments of a range that holds nothing else than one payload, or a part of one."""
    full, rest = divmod(nbytes, SEGMENT_BYTES)
    return [SEGMENT_BYTES] * full + [rest] * bool(rest)


def _group_segments(lengths: Sequence[int]) -> list[list[int]]:
    """Return the lengths of segments in groups that threads write: as many in one as have ``PIECE_BYTES`` together."""
    groups: list[list[int]] = []
    nbytes = 0
    for length in lengths:
        if not groups or nbytes + length > PIECE_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(length)
        nbytes += length
    return groups


def merge_parts(parts: Iterable[FilePart], algorithm: str) -> list[FileRecord]:
    """Return the records of files, by the parts that the ranks have written; a file's rank is the lowest with a part.

    It is a StorageError if parts of a file overlap, leave a hole, or are of files of several sizes.
    """
    by_name: dict[str, list[FilePart]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    records = []
    for name, found in sorted(by_name.items()):
        size = found[0].size
        starts, lengths = (_join(columns) for columns in zip(*((p.starts, p.lengths) for p in found), strict=True))
        digests = [digest for part in found for digest in part.digests]
        starts, order = starts.sort(stable=True)
        lengths = lengths[order]
        ends = starts + lengths
        expected = torch.cat([ends.new_zeros(1), ends[:-1]])
        wrong = (starts != expected).nonzero().view(-1)
        end = int(ends[-1]) if len(ends) else 0
        if len(wrong) or end != size or any(part.size != size for part in found):
            at = int(expected[wrong[0]]) if len(wrong) else end
            raise StorageError(
                f"{name}: the ranks have written {int(lengths.sum())} bytes of {size}, with a hole or an overlap at "
                f"byte {at}: do the shards of all ranks fill their tensors? save with validate_access_integrity=True"
            )
        table = Segments(lengths.tolist(), (digests[number] for number in order.tolist()), algorithm)
        records.append(
            make_record(name, size, min(part.rank for part in found), sum(part.keys for part in found), table)
        )
    return records


def _join(columns: Iterable[array[int]]) -> torch.Tensor:
    return torch.cat([torch.tensor(column.tolist(), dtype=torch.int64, device="cpu") for column in columns])

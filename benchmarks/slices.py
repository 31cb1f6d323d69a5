"""How fast 1/64 of the rows of tensors is read: by a load, and by ``read`` of an opened checkpoint, against preadv.

Plain reads take the same bytes from the same file, whose places they know, by two threads that exist already. For a
load they fill memory that is touched, as the load does; for ``read``, which returns new tensors, they fill new memory.
"Digested" reads the whole segments that have these bytes, with the digest of each: what a load that checks digests
costs at least. "open, read" opens the checkpoint for each read; "read" keeps it open, as a server does. All files are
in the page cache. Medians of interleaved rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from xxhash import xxh3_64_intdigest

from benchmarks.machine import describe
from shardckpt import ShardedTensor, dist_checkpointing
from shardckpt.cli.table import table
from shardckpt.storage.digest import Segments
from shardckpt.tensors import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.manifest import Record

_THREADS = 2
_ROWS, _SLICES, _CHOSEN = 4096, 64, 21
_MIB = 1 << 20
_HEADERS = ("tensors", "format", "operation", "ms", "plain", "of plain", "digested, of plain")
#: Bytes by which a slice is found in a file; no two tensors have the same.
_MARK = 256


class _Read(NamedTuple):
    """A range of a file, and its memory."""

    path: Path
    offset: int
    memory: memoryview


class _Files:
    """A checkpoint of some tensors of equal size, the places of a slice of each, and memory for the slices.

    Args:
        path: Where it is saved.
        strategy: Backend and version.
        count: How many tensors.
        mib: MiB of each.
        pool: Threads for plain reads.
    """

    def __init__(self, path: Path, strategy: tuple[str, int], count: int, mib: int, pool: ThreadPoolExecutor) -> None:
        self._path, self._pool = path, pool
        base = torch.rand(_ROWS, mib * _MIB // 4 // _ROWS)
        self._shape = (_ROWS // _SLICES, base.shape[1])
        tensors = {f"layers.{n}.weight": base + n for n in range(count)}
        described = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
        dist_checkpointing.save(described, path, strategy)
        rows = slice(_CHOSEN * self._shape[0], (_CHOSEN + 1) * self._shape[0])
        self.regions = dict.fromkeys(tensors, rows)
        marks = [bytes(tensor_bytes(tensor[rows])[:_MARK]) for tensor in tensors.values()]
        self._places = list(_find(path, marks))
        self._slices = [torch.zeros(self._shape) for _ in tensors]
        self.described = {
            key: ShardedTensor.from_rank_offsets(key, part, (0, _CHOSEN, _SLICES))
            for key, part in zip(tensors, self._slices, strict=True)
        }
        with dist_checkpointing.open_checkpoint(path) as checkpoint:
            assert checkpoint.record is not None
            self._segments = list(self._cut(checkpoint.record))
        self._buffers = [memoryview(bytearray(4 * _MIB)) for _ in range(_THREADS)]

    def load(self) -> None:
        """Load the slices in place."""
        dist_checkpointing.load(self.described, self._path, validate_access_integrity=False)

    def open_and_read(self) -> None:
        """Open the checkpoint, and read the slices."""
        with dist_checkpointing.open_checkpoint(self._path) as checkpoint:
            checkpoint.read(self.regions)

    def read_plain(self, *, is_new: bool) -> None:
        """Read the slices by preadv, into new memory or into what is touched already."""
        slices = [torch.empty(self._shape) for _ in self._slices] if is_new else self._slices
        reads = [
            _Read(path, offset, tensor_bytes(part)) for (path, offset), part in zip(self._places, slices, strict=True)
        ]
        self._each([partial(_read, some) for some in _halve(reads)])

    def read_digested(self) -> None:
        """Read the segments that have bytes of the slices, and compute their digests."""
        halves = zip(_halve(self._segments), self._buffers, strict=True)
        self._each([partial(_digest, some, buffer) for some, buffer in halves])

    def _cut(self, record: Record) -> Iterator[tuple[Path, int, int]]:
        """Yield path, start and stop of the segments."""
        nbytes = self._slices[0].nbytes
        tables = {
            file.name: Segments.unpack(file.segments, file.digest, file.size, record.digest_algorithm)
            for file in record.files
            if isinstance(file.segments, str)
        }
        for path, offset in self._places:
            for start, stop, _ in tables[path.name].touching(offset, offset + nbytes):
                yield path, start, stop

    def _each(self, calls: Sequence[Callable[[], None]]) -> None:
        for task in [self._pool.submit(call) for call in calls]:
            task.result()


def _find(path: Path, marks: Sequence[bytes]) -> Iterator[tuple[Path, int]]:
    """Yield the file and the offset of each mark; it is there once."""
    with ExitStack() as stack:
        maps = {}
        for name in sorted(path.iterdir()):
            file = stack.enter_context(name.open("rb"))
            if name.stat().st_size > _MIB:
                maps[name] = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        last = dict.fromkeys(maps, 0)
        for mark in marks:
            # most tensors lie in the order of their keys
            found = (
                (name, max(data.find(mark, last[name]), data.find(mark, 0, last[name]))) for name, data in maps.items()
            )
            name, last_place = next((name, place) for name, place in found if place >= 0)
            last[name] = last_place
            yield name, last_place


def _halve(items: Sequence[_Read] | Sequence[tuple[Path, int, int]]) -> list[Sequence[_Read]]:
    middle = (len(items) + 1) // _THREADS
    return [items[:middle], items[middle:]]  # type: ignore[list-item]


def _read(reads: Sequence[_Read]) -> None:
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in {read.path for read in reads}}
        for path, offset, memory in reads:
            if os.preadv(files[path].fileno(), [memory], offset) != memory.nbytes:
                raise EOFError(f"{path} is shorter than it was")


def _digest(segments: Sequence[tuple[Path, int, int]], buffer: memoryview) -> None:
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in {path for path, _, _ in segments}}
        for path, start, stop in segments:
            os.preadv(files[path].fileno(), [buffer[: stop - start]], start)
            xxh3_64_intdigest(buffer[: stop - start])


def _measure(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each call; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def _compare(files: _Files, path: Path, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each operation."""
    with dist_checkpointing.open_checkpoint(path) as checkpoint:
        found = _measure(
            {
                "plain": partial(files.read_plain, is_new=False),
                "load": files.load,
                "digested": files.read_digested,
                "plain, new": partial(files.read_plain, is_new=True),
                "open, read": files.open_and_read,
                "read": lambda: checkpoint.read(files.regions) and None,
            },
            rounds,
        )
    for name in ("load", "open, read", "read"):
        plain = found["plain" if name == "load" else "plain, new"]
        digested = f"{found['plain'] / found['digested']:.2f}" if name == "load" else ""
        yield name, f"{found[name]:.2f}", f"{plain:.2f}", f"{plain / found[name]:.2f}", digested


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensors", default="8x128,32x64,32x32", help="how many, and MiB of each (%(default)s)")
    parser.add_argument("--formats", default="torch_dist,safetensors", help="backends (%(default)s)")
    parser.add_argument("--rounds", type=int, default=41, help="(%(default)s)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="(%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(describe(options.directory)))
    rows = []
    folder = Path(tempfile.mkdtemp(prefix="slices-", dir=options.directory))
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for tensors in options.tensors.split(","):
                count, mib = map(int, tensors.split("x"))
                for backend in options.formats.split(","):
                    path = folder / f"{backend}-{tensors}"
                    files = _Files(path, (backend, 1), count, mib, pool)
                    rows += [
                        (f"{count} x {mib} MiB", backend, *cells) for cells in _compare(files, path, options.rounds)
                    ]
                    del files
                    shutil.rmtree(path)
    finally:
        shutil.rmtree(folder)
    print(table(_HEADERS, rows))


if __name__ == "__main__":
    main()

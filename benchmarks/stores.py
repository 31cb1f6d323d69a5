"""Saves to and loads from S3, beside the client alone and DCP by s3fs, ``python -m benchmarks.stores``.

The server is :mod:`benchmarks.memory_server`, a process on loopback that writes no disk: client and server share the
processors, which bound all columns. The client alone is obstore, which puts and gets the same bytes in the same parts,
as many at a time; the copying client also has them in tensors at the end. Columns are measured in turns; seconds are
medians of the rounds, requests, memory and local disk those of the last one: memory is the most that the process holds
beyond what it held before, disk what is in the directory of temporary files, looked at every millisecond. A slice is
1/64 of the rows of each tensor. The second table is of a manager: a save with retention, and ``steps()``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import obstore
import torch
import torch.distributed.checkpoint as dcp
from obstore.store import S3Store

from benchmarks.machine import describe
from benchmarks.memory_server import COUNTS
from shardckpt import ShardedTensor, dist_checkpointing, settings
from shardckpt.cli.table import table
from shardckpt.manager import CheckpointConfig, CheckpointManager

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ImportError:  # torch before 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

_KINDS = ("PUT", "POST", "GET", "HEAD", "LIST", "DELETE")
_MIB = 1 << 20
#: A slice has one of so many parts.
_SLICES = 64
_OPERATIONS = ("save", "load", "slice")


class _Column(Protocol):
    def save(self, tensors: list[torch.Tensor], name: str) -> None:
        """Save them under a name that is free."""

    def load(self, tensors: list[torch.Tensor], name: str) -> None:
        """Load them from where they were saved."""

    def slice(self, tensors: list[torch.Tensor], name: str) -> None:
        """Load the first of 64 parts of the rows of each, of which the tensors are."""


class _Shardckpt:
    """A save or load of one process, digests made and checked."""

    def save(self, tensors: list[torch.Tensor], name: str) -> None:
        dist_checkpointing.save(_describe(tensors), f"s3://bucket/{name}")

    def load(self, tensors: list[torch.Tensor], name: str) -> None:
        dist_checkpointing.load(_describe(tensors), f"s3://bucket/{name}")

    def slice(self, tensors: list[torch.Tensor], name: str) -> None:
        with dist_checkpointing.open_checkpoint(f"s3://bucket/{name}") as checkpoint:
            for number, tensor in enumerate(tensors):
                tensor.copy_(checkpoint[f"w{number}"][: len(tensor)])


class _Client:
    """obstore alone: one object with the bytes of all tensors, which a load leaves in the client's own memory."""

    def __init__(self, endpoint: str) -> None:
        self._store = S3Store("bucket", client_options={"allow_http": True}, endpoint=endpoint)

    def save(self, tensors: list[torch.Tensor], name: str) -> None:
        size = settings.remote_part_mib() * _MIB

        def parts() -> Iterator[memoryview]:
            for tensor in tensors:
                view = memoryview(tensor.numpy()).cast("B")
                for first in range(0, len(view), size):
                    yield view[first : first + size]

        path = f"{name}/data"
        obstore.put(
            self._store, path, parts(), use_multipart=True, chunk_size=size, max_concurrency=settings.remote_parts()
        )

    def load(self, tensors: list[torch.Tensor], name: str) -> None:
        size, total = settings.remote_part_mib() * _MIB, sum(tensor.nbytes for tensor in tensors)

        def get(first: int) -> None:
            obstore.get_range(self._store, f"{name}/data", start=first, length=min(size, total - first))

        with ThreadPoolExecutor(settings.remote_threads()) as threads:
            list(threads.map(get, range(0, total, size)))

    def slice(self, tensors: list[torch.Tensor], name: str) -> None:
        for number, tensor in enumerate(tensors):
            first = number * _SLICES * tensor.nbytes
            found = obstore.get_range(self._store, f"{name}/data", start=first, length=tensor.nbytes)
            memoryview(tensor.numpy()).cast("B")[:] = memoryview(found)


class _IntoTensors(_Client):
    """obstore alone, whose load copies each answer into the tensors, where the other columns leave theirs."""

    def load(self, tensors: list[torch.Tensor], name: str) -> None:
        size = settings.remote_part_mib() * _MIB
        views = [memoryview(tensor.numpy()).cast("B") for tensor in tensors]
        starts = [0, *accumulate(view.nbytes for view in views)]
        # a request is of one tensor, as many bytes as above
        ranges = [(n, at) for n, view in enumerate(views) for at in range(0, view.nbytes, size)]

        def get(number: int, at: int) -> None:
            target = views[number][at : at + size]
            start = starts[number] + at
            target[:] = memoryview(obstore.get_range(self._store, f"{name}/data", start=start, length=target.nbytes))

        with ThreadPoolExecutor(settings.remote_threads()) as threads:
            list(threads.map(get, *zip(*ranges, strict=True)))


class _Dcp:
    """torch.distributed.checkpoint by its fsspec storage, which s3fs serves."""

    def save(self, tensors: list[torch.Tensor], name: str) -> None:
        dcp.save(_name(tensors), storage_writer=FsspecWriter(f"s3://bucket/{name}"))

    def load(self, tensors: list[torch.Tensor], name: str) -> None:
        dcp.load(_name(tensors), storage_reader=FsspecReader(f"s3://bucket/{name}"))

    def slice(self, tensors: list[torch.Tensor], name: str) -> None:
        whole = [
            tensor.new_empty(len(tensor) * _SLICES) for tensor in tensors
        ]  # one process: it has no smaller request
        self.load(whole, name)
        for tensor, found in zip(tensors, whole, strict=True):
            tensor.copy_(found[: len(tensor)])


class _Watch:
    """The most bytes that this process holds beyond what it held before, and that are in a directory, in a block."""

    def __init__(self, directory: Path) -> None:
        self.memory = self.disk = 0
        self._directory = directory
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _read_kib("VmRSS")
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.memory = max(0, _read_kib("VmHWM") - self._before) << 10

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            with contextlib.suppress(OSError):  # a file that has gone meanwhile
                found = sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file())
                self.disk = max(self.disk, found)


def _read_kib(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


def _name(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"w{number}": tensor for number, tensor in enumerate(tensors)}


def _describe(tensors: list[torch.Tensor]) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in _name(tensors).items()}


@contextlib.contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.memory_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.stdin.close()
            process.wait(60)


def _count(endpoint: str) -> dict[str, int]:
    with urllib.request.urlopen(endpoint + COUNTS, timeout=60) as answer:  # noqa: S310 - our own server
        return json.load(answer)  # type: ignore[no-any-return]


def measure(endpoint: str, mib: int, count: int, rounds: int, directory: Path) -> list[tuple[str, ...]]:
    """Return a row for each operation and column; local files are looked for in the directory."""
    client = _Client(endpoint)
    columns: dict[str, _Column] = {
        "client": client,
        "copying client": _IntoTensors(endpoint),
        "shardckpt": _Shardckpt(),
        "dcp, s3fs": _Dcp(),
    }
    tensors = [torch.randn(mib * _MIB // 4 // count) for _ in range(count)]
    loaded = [torch.zeros_like(tensor) for tensor in tensors]
    slices = [torch.zeros(len(tensor) // _SLICES) for tensor in tensors]
    cleaner = S3Store("bucket", client_options={"allow_http": True}, endpoint=endpoint)
    seconds: dict[tuple[str, str], list[float]] = {}
    requests: dict[tuple[str, str], dict[str, int]] = {}
    peaks: dict[tuple[str, str], _Watch] = {}
    for number in range(-1, rounds):  # the first warms up
        for name, column in columns.items():
            where = f"{name.partition(',')[0]}-{number + 1}"
            for operation, call, given in (
                ("save", column.save, tensors),
                ("load", column.load, loaded),
                ("slice", column.slice, slices),
            ):
                _count(endpoint)
                began = time.perf_counter()
                if number < rounds - 1:  # the watch costs some time
                    call(given, where)
                else:
                    with _Watch(directory) as watch:
                        call(given, where)
                    peaks[operation, name] = watch
                took = time.perf_counter() - began
                requests[operation, name] = _count(endpoint)
                if number >= 0:
                    seconds.setdefault((operation, name), []).append(took)
            if column is not client:
                assert all(torch.equal(one, other) for one, other in zip(tensors, loaded, strict=True)), name
                for tensor in loaded:
                    tensor.zero_()
            assert all(torch.equal(one[: len(part)], part) for one, part in zip(tensors, slices, strict=True)), name
            for tensor in slices:
                tensor.zero_()
            obstore.delete(cleaner, [each["path"] for each in obstore.list(cleaner, where).collect()])
    rows = []
    for (operation, name), times in sorted(seconds.items(), key=lambda item: _OPERATIONS.index(item[0][0])):
        median, alone = statistics.median(times), statistics.median(seconds[operation, "client"])
        per_gib = [f"{requests[operation, name].get(kind, 0) * 1024 / mib:.0f}" for kind in _KINDS]
        speed = mib / 1024 / median / (_SLICES if operation == "slice" else 1)
        watch = peaks[operation, name]
        peak = [f"{watch.memory / _MIB:.0f}", f"{watch.disk / _MIB:.1f}"]
        rows.append((operation, name, f"{median:.3f}", f"{speed:.2f}", f"{alone / median:.2f}", *peak, *per_gib))
    return rows


def measure_manager(endpoint: str, counts: Sequence[int]) -> list[tuple[str, ...]]:
    """Return a row for each number of steps that stay: a save after which one goes, and two calls of ``steps()``."""
    rows = []
    for keep in counts:
        folder = f"s3://bucket/run-{keep}"
        config = CheckpointConfig(folder=folder, interval=1, keep_latest_k=keep)
        model = torch.nn.Linear(256, 256)
        with CheckpointManager(config, {"model": model}) as manager:
            for step in range(1, keep + 1):
                manager.save(step)
            manager.wait()
            saved = _time(endpoint, lambda: (manager.save(keep + 1), manager.wait()))  # noqa: B023 - called at once
            known = _time(endpoint, manager.steps)
        with CheckpointManager(config, {"model": model}) as manager:
            found = _time(endpoint, manager.steps)
        rows.append((str(keep), *saved, *known, *found))
    return rows


def _time(endpoint: str, call: Callable[[], object]) -> tuple[str, str]:
    _count(endpoint)
    began = time.perf_counter()
    call()
    took = time.perf_counter() - began
    return f"{took:.3f}", str(sum(_count(endpoint).values()))


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--tensors", type=int, default=8, help="in so many tensors")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    with _server() as endpoint:
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            # else botocore adds checksums after the body, in an encoding of their own
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }
        lines = describe(Path(tempfile.gettempdir()))
        with tempfile.TemporaryDirectory() as directory:
            os.environ |= {"SHARDCKPT_SPOOL_DIR": directory, "TMPDIR": directory}
            tempfile.tempdir = directory
            rows = measure(endpoint, given.mib, given.tensors, given.rounds, Path(directory))
            managed = measure_manager(endpoint, (3, 12))
    print("\n".join(lines))
    print(f"{given.mib} MiB in {given.tensors} tensors, one process, median of {given.rounds} rounds; requests per GiB")
    print(table(("operation", "by", "s", "GiB/s", "of the client's speed", "MiB", "disk MiB", *_KINDS), rows))
    print("\na manager of a small model: seconds and requests")
    print(table(("steps", "save, s", "requests", "steps(), s", "requests", "of a new one, s", "requests"), managed))


if __name__ == "__main__":
    main()

"""Whether a change made saves and loads slower: two revisions of this repository, in turns, in one run.

``python -m benchmarks.revisions OLD NEW`` takes revisions of git, or folders with a checkout. Each round starts every
revision's ranks anew, the later revision first in every second round; the state is tensors of one size, sharded over
the ranks, with gloo. Both write to the same file system, and sync what their commits sync. Of a round the slowest rank
counts; the first save has the imports of its strategy. A slice is 1/64 of each tensor, and of a background save the
time until the state may change counts. Medians with the least and the most, in seconds, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OPERATIONS = ("first save", "second save", "first load", "second load", "slice", "background save")
#: A slice is one of so many parts.
_PARTS = 64
_HEADERS = ("backend", "ranks", "operation", "old (s)", "new (s)", "new / old")
#: Seconds that one revision's ranks may take for a round.
_LIMIT = 600.0
_ROOT = Path(__file__).resolve().parents[1]


def measure(folder: Path, rank: int, world: int, backend: str, tensors: int, size: int) -> list[float]:
    """Collective: return this rank's seconds by operation, with the revision that is on the path."""
    import torch
    import torch.distributed as dist

    from shardckpt import ShardedTensor, dist_checkpointing
    from shardckpt.async_save import AsyncCallsQueue

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=_LIMIT))

    def describe(value: float, parts: int = 1) -> dict[str, Any]:
        """Return the first of so many parts of this rank's part of each tensor."""
        return {
            f"layers.{number}": ShardedTensor.from_rank_offsets(
                f"layers.{number}", torch.full((size // 4 // parts,), value + number), (0, rank * parts, world * parts)
            )
            for number in range(tensors)
        }

    def timed(operation: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        operation()
        return time.perf_counter() - began

    saved, wanted, slices = describe(1.0), describe(0.0), describe(0.0, _PARTS)
    seconds = [
        *(timed(lambda name=name: dist_checkpointing.save(saved, folder / name, (backend, 1))) for name in ("1", "2")),
        *(timed(lambda name=name: dist_checkpointing.load(wanted, folder / name)) for name in ("1", "2")),
        timed(lambda: dist_checkpointing.load(slices, folder / "2", validate_access_integrity=False)),
    ]
    for found in (wanted, slices):
        if not all(torch.equal(found[key].data, saved[key].data[: len(found[key].data)]) for key in saved):
            raise SystemExit("a load has other values than the save")

    def start(name: str) -> None:
        request = dist_checkpointing.save(saved, folder / name, (backend, 1), async_sharded_save=True)
        queue.schedule_async_request(request)

    with AsyncCallsQueue() as queue:
        for name in ("3", "4"):
            blocked = timed(lambda name=name: start(name))
            queue.maybe_finalize_async_calls(blocking=True)
    seconds.append(blocked)  # of the second: the first one makes the staging memory
    dist.destroy_process_group()
    return seconds


def run_ranks(script: str, checkout: Path, folder: Path, world: int, arguments: Sequence[object]) -> list[Any]:
    """Return the answers of ranks, processes that run a script with a revision on its path.

    Args:
        script: It is called with ``--rank``, the rank, the number of ranks, a new folder and the arguments, and prints
            the file of the package that it imported, and its answer, as JSON.
        checkout: The folder of the revision.
        folder: Where the new folder is made, and removed.
        world: The number of ranks.
        arguments: Further arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (checkout, checkout / "strategies"))),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    target = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, str(Path(script).resolve()), "--rank"]
    ranks = [
        subprocess.Popen(
            [*command, *map(str, (rank, world, target, *arguments))],
            env=environment,
            cwd=checkout,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        answers = [rank.communicate(timeout=_LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        shutil.rmtree(target)
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{checkout}: a rank ended with an error, above")
    found = [json.loads(each) for each in answers]
    for package, _ in found:
        if not Path(package).is_relative_to(checkout):
            raise SystemExit(f"{package} was imported, not that of {checkout}")
    return [answer for _, answer in found]


def run_rounds(
    script: str, checkouts: Sequence[Path], folder: Path, world: int, arguments: Sequence[object], rounds: int
) -> list[list[list[Any]]]:
    """Return what the ranks of each of two checkouts answer in each round; the later one begins every second round."""
    found: list[list[list[Any]]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append(run_ranks(script, checkouts[which], folder, world, arguments))
    return found


def check_out(revision: str, folder: Path) -> Path:
    """Return the folder of a revision: the one that is named, or an export of what git has."""
    if Path(revision).is_dir():
        return Path(revision).resolve()
    git = shutil.which("git") or "git"
    archive = subprocess.run([git, "archive", revision], cwd=_ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def _make_rows(backend: str, world: int, rounds: Sequence[Sequence[list[float]]]) -> list[tuple[str, ...]]:
    """Return a row for each operation; ``rounds`` are those of the old revision and those of the new."""
    rows = []
    for number, operation in enumerate(_OPERATIONS):
        values = [[seconds[number] for seconds in each] for each in rounds]
        medians = [statistics.median(each) for each in values]
        shown = [
            f"{median:.3f} ({min(each):.3f} to {max(each):.3f})" for median, each in zip(medians, values, strict=True)
        ]
        rows.append((backend, str(world), operation, *shown, f"{medians[1] / medians[0]:.2f}"))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    parser.add_argument("old", help="a revision of git, or a folder with a checkout")
    parser.add_argument("new", help="the same; . for this checkout as it is")
    parser.add_argument("--tensors", type=int, default=20_000, help="of each rank")
    parser.add_argument("--bytes", type=int, default=1024, help="of each tensor")
    parser.add_argument("--backends", nargs="+", default=["torch_dist", "safetensors"], help="of strategies, version 1")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where checkpoints are written")
    given = parser.parse_args(arguments)
    if given.bytes < 4 * _PARTS:
        parser.error(f"--bytes: {4 * _PARTS} at least, of which a slice is 4")

    from benchmarks.machine import describe
    from shardckpt.cli.table import table

    with tempfile.TemporaryDirectory(prefix="shardckpt-revisions-", dir=given.directory) as name:
        folder = Path(name).resolve()
        checkouts = [check_out(given.old, folder / "old"), check_out(given.new, folder / "new")]
        print("\n".join(describe(folder)))
        rows: list[tuple[str, ...]] = []
        for backend, world in itertools.product(given.backends, given.ranks):
            options = (backend, given.tensors, given.bytes)
            answers = run_rounds(__file__, checkouts, folder, world, options, given.rounds)
            slowest = [[[max(each) for each in zip(*ranks, strict=True)] for ranks in rounds] for rounds in answers]
            rows += _make_rows(backend, world, slowest)
    print(
        f"{given.tensors} tensors of {given.bytes} bytes a rank, medians of {given.rounds} rounds in turns (from, to)"
    )
    print(f"old: {given.old}, new: {given.new}; both sync each file, the manifest and the directories of a save")
    print(table(_HEADERS, rows))


def _answer(rank: str, world: str, folder: str, backend: str, tensors: str, size: str) -> None:
    """Print a rank's seconds, for the process that compares."""
    seconds = measure(Path(folder), int(rank), int(world), backend, int(tensors), int(size))
    print(json.dumps([sys.modules["shardckpt"].__file__, seconds]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.path.remove(str(Path(__file__).resolve().parent))  # the benchmarks' own modules, in the way of others
        _answer(*sys.argv[2:])
    else:
        main()

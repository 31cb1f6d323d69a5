"""The runner: one pass over the plan, one table."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import files, machine, memory, reshard, simulate
from benchmarks.bench import Bench
from benchmarks.messages import Layout
from benchmarks.options import Options, parse
from benchmarks.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: The memory and the disk that a run may take.
_MEMORY, _DISK = 6 << 30, 12 << 30
#: Checkpoints of resharding lie side by side, one an adapter.
_SIDE_BY_SIDE = 4


class TooLargeError(Exception):
    """The scale asks for more than a run may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results; 1 if any adapter failed."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up as after Ctrl-C
    try:
        _check_size(options)
        with (
            _folder("shardckpt-bench-", options.directory) as folder,
            _folder("ranks-", None) as scratch,
            Bench(options, folder, scratch) as bench,
        ):
            about = machine.describe(folder)
            _run(bench)
            report = Report(bench.results, bench.adapters, [*about, *_about(bench)], bench.notes)
    except TooLargeError as exc:
        print(exc, file=sys.stderr)
        return 2
    print(report.text())
    if options.results is not None:
        options.results.write_text(report.markdown())
    return int(bench.failed)


def _run(bench: Bench) -> None:
    bench.rehearse()
    for (workload, world), operations in bench.options.plan.items():
        if bench.over():
            bench.note(f"{workload}, {world} ranks: left out: the time was up")
            continue
        print(f"... {workload}, {world} ranks: {', '.join(operations)}", file=sys.stderr, flush=True)
        if not {"reshard", "memory"}.issuperset(operations):
            files.measure(bench, workload, world, operations)
        if "reshard" in operations:
            reshard.measure(bench, workload)
        if "memory" in operations:
            memory.measure(bench, workload)
    simulate.measure(bench)


def _about(bench: Bench) -> list[str]:
    """Versions, and what each syncs."""
    return [f"{name} {about['version']} syncs {about['syncs']}" for name, about in bench.about.items()]


def _check_size(options: Options) -> None:
    """Refuse what would not fit: a state in every kind of process, one in staging; checkpoints side by side."""
    largest = max((Layout(w, options.scale, 1).needed() for w, _ in options.plan), default=0)
    resharded = [Layout(w, options.scale, 1).needed() for (w, _), names in options.plan.items() if "reshard" in names]
    memory_needed, disk = 3 * largest, max([2 * largest, *(_SIDE_BY_SIDE * size for size in resharded)])
    if memory_needed > _MEMORY * 1.05 or disk > _DISK:
        raise TooLargeError(f"--scale {options.scale} takes {memory_needed >> 30} GiB of memory, {disk >> 30} of disk")
    free = shutil.disk_usage(options.directory or tempfile.gettempdir()).free
    if disk > free:
        raise TooLargeError(f"--scale {options.scale} takes {disk >> 20} MiB of disk, {free >> 20} are free")


@contextmanager
def _folder(prefix: str, directory: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory, ignore_cleanup_errors=True) as name:
        yield Path(name)


__all__ = ["main"]

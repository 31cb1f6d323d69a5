"""Saves and loads: rounds of turns, an adapter a turn; a checkpoint lies on the disk only while it is measured."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from benchmarks.bench import blocked, rotated, seconds
from benchmarks.machine import can_drop_caches, drop_caches, on_tmpfs, warm
from benchmarks.messages import Layout
from benchmarks.results import Row
from benchmarks.workloads import TITLES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.messages import Sample

_LOADS = {"load": (False, False), "cold-load": (False, True), "slice": (True, False), "cold-slice": (True, True)}
_NAMES = {
    "load": "load",
    "cold-load": "load, cold",
    "slice": "load 1/64 of rows",
    "cold-slice": "load 1/64 of rows, cold",
}


def measure(bench: Bench, workload: str, world: int, operations: Sequence[str]) -> None:
    """Every adapter's saves, loads, slices and background saves of a workload."""
    layout = Layout(workload, bench.options.scale, world)
    bench.setup(layout)
    allowed = [o for o in operations if not o.startswith("cold") or _can_be_cold(bench)]
    turns = {adapter: _Turn(bench, layout, adapter, allowed) for adapter in bench.adapters}
    rounds(bench, lambda adapter, number: turns[adapter].take(number))


def rounds(bench: Bench, turn: Callable[[str, int], bool], share: float = 1.0) -> None:
    """Interleave turns; who fails in one has no more. Ends when the rounds or the time are over.

    Args:
        bench: Has the adapters and the limits.
        turn: Takes an adapter and the number of the round; whether the adapter goes on.
        share: Of the budget of seconds.
    """
    began, running = time.monotonic(), list(bench.adapters)
    for number in range(bench.options.rounds):
        passed = time.monotonic() - began
        if number and passed * (number + 1) / number > bench.options.budget * share:
            return
        for adapter in rotated(list(running), number):
            if bench.over():
                bench.note("some turns are left out: the time was up")
                return
            if not turn(adapter, number):
                running.remove(adapter)


def title(layout: Layout) -> str:
    """How the table calls a group of rows."""
    size = layout.needed() / (1 << 20)
    shown = f"{size:.0f} MiB" if size >= 1 else f"{size * 1024:.0f} KiB"
    return f"{TITLES[layout.workload]}, {shown}, {layout.world} rank{'s' if layout.world > 1 else ''}"


class _Turn:
    """What an adapter does in a round."""

    def __init__(self, bench: Bench, layout: Layout, adapter: str, operations: Sequence[str]) -> None:
        self._bench, self._layout, self._adapter = bench, layout, adapter
        self._can = [o for o in operations if bench.can(adapter, o.removeprefix("cold-"), layout.world)]
        self._path = bench.folder / "checkpoint"

    def take(self, number: int) -> bool:
        """Do all operations once; whether none failed."""
        try:
            return self._files(first=not number) and ("async" not in self._can or self._behind(first=not number))
        finally:
            remove(self._path)

    def _files(self, *, first: bool) -> bool:
        loads = [operation for operation in self._can if operation in _LOADS]
        if not loads and "save" not in self._can:
            return True
        if not self._time("save", "save", seen="save" in self._can):
            return False
        return all(self._load(operation, first=first) for operation in loads)

    def _load(self, operation: str, *, first: bool) -> bool:
        sliced, cold = _LOADS[operation]
        checked = not first or cold or self._call("check", sliced=sliced) is not None
        if not checked:
            return False
        if cold:
            drop_caches()
        else:
            warm(self._path)
        return self._time(operation, "load", sliced=sliced)

    def _time(self, operation: str, method: str, *, seen: bool = True, **kwargs: bool) -> bool:
        samples = self._call(method, **kwargs)
        if samples is None:
            return False
        if seen:
            self._record(_NAMES.get(operation, operation), "s", seconds(samples))
        if operation in ("load", "slice") and not self._bench.about[self._adapter]["maps_files"]:
            needed = self._layout.needed(sliced=operation == "slice")
            self._record(f"{_NAMES[operation]}: read", "x", sum(sample.read for sample in samples) / needed)
        return True

    def _behind(self, *, first: bool) -> bool:
        """Two background saves, of which the second finds the staging memory of the first."""
        for attempt in range(2):
            remove(self._path)
            samples = self._call("save_behind")
            if samples is None:
                return False
            if attempt:
                self._record("async save: blocked", "s", blocked(samples))
                self._record("async save: whole", "s", seconds(samples))
        checked = not first or self._call("check") is not None
        return checked and self._bench.attempt(self._adapter, self._layout.world, "release") is not None

    def _call(self, method: str, **kwargs: bool) -> list[Sample] | None:
        return self._bench.attempt(self._adapter, self._layout.world, method, str(self._path), **kwargs)

    def _record(self, name: str, unit: str, value: float) -> None:
        self._bench.record(Row(title(self._layout), name, unit), self._adapter, value)


def remove(path: Path) -> None:
    """Delete a checkpoint, if it is there, and what was left beside it."""
    for left in path.parent.glob(f"*{path.name}*"):
        shutil.rmtree(left)


def _can_be_cold(bench: Bench) -> bool:
    if on_tmpfs(bench.folder):
        bench.note("cold loads are left out: tmpfs is memory")
    elif not can_drop_caches():
        bench.note("cold loads are left out: only root empties the page cache")
    else:
        return True
    return False


__all__ = ["measure", "remove", "rounds", "title"]

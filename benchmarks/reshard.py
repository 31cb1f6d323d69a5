"""Loads of what another number of ranks saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.bench import seconds
from benchmarks.files import remove, rounds, title
from benchmarks.machine import warm
from benchmarks.messages import Layout
from benchmarks.results import Row

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench

_AXES = {"rows": 0, "columns": 1}
_WORLDS = ((4, 2), (2, 4))


def measure(bench: Bench, workload: str) -> None:
    """Every adapter that can, from 4 ranks to 2 and from 2 to 4, cut along rows and along columns."""
    for before, after in _WORLDS:
        for name, axis in _AXES.items():
            if not bench.over():
                _Reshard(bench, Layout(workload, bench.options.scale, before, axis), after, name).measure()


class _Reshard:
    def __init__(self, bench: Bench, layout: Layout, after: int, name: str) -> None:
        self._bench, self._before = bench, layout
        self._after = layout._replace(world=after)
        self._row = f"reshard to {after} ranks, {name}"
        self._saved: set[str] = set()

    def measure(self) -> None:
        """Save by all, then load in rounds."""
        bench = self._bench
        try:
            bench.setup(self._before)
            for adapter in bench.adapters:
                if bench.can(adapter, "reshard", self._before.world):
                    saved = bench.attempt(adapter, self._before.world, "save", str(self._path(adapter)))
                    self._saved |= {adapter} if saved is not None else set()
            bench.setup(self._after)
            rounds(bench, self._turn, 1 / (len(_AXES) * len(_WORLDS)))
        finally:
            for adapter in bench.adapters:
                remove(self._path(adapter))

    def _turn(self, adapter: str, number: int) -> bool:
        if adapter not in self._saved:
            return False
        path, world = self._path(adapter), self._after.world
        if not number and self._bench.attempt(adapter, world, "check", str(path)) is None:
            return False
        warm(path)
        samples = self._bench.attempt(adapter, world, "load", str(path))
        if samples is None:
            return False
        group, read = title(self._before), sum(sample.read for sample in samples)
        self._bench.record(Row(group, self._row, "s"), adapter, seconds(samples))
        self._bench.record(Row(group, f"{self._row}: read", "x"), adapter, read / self._after.needed())
        return True

    def _path(self, adapter: str) -> Path:
        return self._bench.folder / f"reshard-{adapter.replace(':', '-')}"


__all__ = ["measure"]

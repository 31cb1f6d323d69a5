"""The peak of memory of a save and of a load, in a process of its own for each adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.files import remove, title
from benchmarks.group import LeftOutError, RankFailedError
from benchmarks.messages import Layout
from benchmarks.results import Row

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.group import RankGroup

_REHEARSAL = 0.0001


def measure(bench: Bench, workload: str) -> None:
    """Every adapter once."""
    layout = Layout(workload, bench.options.scale, 1)
    bench.leave()
    for adapter in bench.adapters:
        if bench.over():
            bench.note(f"peak memory, {workload}: left out from {adapter} on: the time was up")
            return
        group = bench.new_group(adapter, 1)
        try:
            _measure(bench, group, layout, adapter)
        except LeftOutError as exc:
            bench.note(f"{adapter}: {exc}")
        except RankFailedError as exc:
            bench.fail(f"{adapter} FAILED in peak memory", exc)
        finally:
            group.close()
            remove(bench.folder / "peak")


def _measure(bench: Bench, group: RankGroup, layout: Layout, adapter: str) -> None:
    """A small save and load first: what is imported is no memory of a save."""
    for run in (layout._replace(scale=_REHEARSAL), layout):
        remove(bench.folder / "peak")
        group.setup(run)
        for operation in ("save", "load"):
            (peak,) = group.call(1, "peak", adapter, operation, str(bench.folder / "peak"))
            if run is layout:
                bench.record(
                    Row(title(layout), f"{operation}: peak memory over the state", "MiB"), adapter, peak / (1 << 20)
                )


__all__ = ["measure"]

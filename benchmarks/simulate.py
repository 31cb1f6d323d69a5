"""Planning, validation and metadata of many ranks, in one process a library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.group import LeftOutError, RankFailedError
from benchmarks.results import Row

if TYPE_CHECKING:
    from benchmarks.bench import Bench

_SHARDS = 1000
#: Chunks from which on a million are measured too.
_MANY = 256_000
_FUNCTIONS = {
    "shardckpt": "benchmarks.simulation.shardckpt:simulate",
    "dcp-1": "benchmarks.simulation.dcp:simulate",
    "megatron": "benchmarks.simulation.megatron:simulate",
}
_IN_PARTS = "benchmarks.simulation.index_parts:simulate"


def measure(bench: Bench) -> None:
    """Every number of ranks by every library; shards a rank are fewer where there would be too many chunks."""
    bench.leave()
    for ranks in bench.options.simulated:
        for adapter in [name for name in bench.adapters if name in _FUNCTIONS]:
            if bench.over():
                bench.note(f"{ranks} simulated ranks: left out from {adapter} on: the time was up")
                return
            _measure(bench, adapter, ranks, max(1, min(_SHARDS, bench.options.chunks // ranks)))
    if bench.options.chunks >= _MANY and "shardckpt" in bench.adapters:
        _measure(bench, "shardckpt", 1000, _SHARDS)  # a million: minutes and many GiB for the others
        for ranks in bench.options.simulated:
            if ranks * _SHARDS > _MANY:  # all of them, however many
                _measure(bench, "shardckpt", ranks, _SHARDS, _IN_PARTS)


def _measure(bench: Bench, adapter: str, ranks: int, shards: int, function: str = "") -> None:
    workload = f"{ranks:,} simulated ranks x {shards:,} shards"
    workload += ", (safetensors, 1) with an index in parts" if function else ""
    function = function or _FUNCTIONS[adapter]
    group = bench.new_group(adapter, 1)
    try:
        (figures,) = group.call(1, "call", function, ranks, shards, _SHARDS, str(bench.folder / "simulated"))
    except (LeftOutError, RankFailedError) as exc:
        bench.fail(f"{adapter} FAILED to simulate {ranks} ranks", exc)
        return
    finally:
        group.close()
    for (title, unit), value in figures.items():
        bench.record(Row(workload, title, unit), adapter, value)


__all__ = ["measure"]

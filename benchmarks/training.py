"""Whether a change made a training's saves slower: models of many small parameters with Adam, two revisions in turns.

``python -m benchmarks.training OLD NEW`` takes revisions of git, or folders with a checkout. ``adam``: how long
``CheckpointManager.save`` blocks, in the background, beside a clone of each tensor of the same state by one thread.
Several ranks have the model under FSDP2, with gloo; one has no process group. ``optimizers``: one rank saves and loads
a model with an optimizer for each parameter, beside one optimizer for all of them. Each round starts every revision's
ranks anew, the later revision first in every second round; of a save the slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_HEADERS = ("workload", "ranks", "operation", "beside", "old (s)", "times", "new (s)", "times")
#: Seconds for which ranks wait for each other.
_LIMIT = 600.0
#: The saves of a rank, the first one among them.
_SAVES = 5
#: Rows and columns of parameters of float32: 1, 4, 8 and 16 KiB.
_SHAPES = ((16, 16), (32, 32), (64, 32), (64, 64))


def measure_adam(folder: Path, rank: int, world: int, count: int) -> dict[str, list[float]]:
    """Collective: return a rank's seconds of clones and of saves."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from shardckpt.manager import CheckpointConfig, CheckpointManager

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=_LIMIT))
    model = _make_model(count)
    if world > 1:
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer)
    state = [*model.parameters(), *(each for one in optimizer.state.values() for each in one.values())]
    tensors = [each.detach().to_local() if isinstance(each, DTensor) else each.detach() for each in state]
    config = CheckpointConfig(folder=str(folder), interval=1, async_mode="async", keep_latest_k=2)
    seconds: dict[str, list[float]] = {"copy": [], "save": []}
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        for step in range(1, _SAVES + 1):
            optimizer.param_groups[0]["lr"] = 1 / step  # as a scheduler does
            for name, work in (
                ("copy", lambda: [tensor.clone() for tensor in tensors]),
                ("save", lambda step=step: manager.save(step)),
            ):
                if world > 1:
                    dist.barrier()
                began = time.perf_counter()
                work()
                seconds[name].append(time.perf_counter() - began)
            manager.wait()
    if world > 1:
        dist.destroy_process_group()
    return seconds


def measure_optimizers(folder: Path, _rank: int, _world: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of saves and loads with one optimizer, and with one for each parameter."""
    import torch

    from shardckpt import dist_checkpointing
    from shardckpt.adapters import load_into, to_sharded_state_dict

    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}

    def save(model: nn.Module, optimizers: list[Any], path: Path) -> None:
        dist_checkpointing.save(to_sharded_state_dict(model, *optimizers), path)

    def load(model: nn.Module, optimizers: list[Any], path: Path) -> None:
        load_into(dist_checkpointing.load(to_sharded_state_dict(model, *optimizers), path), model, *optimizers)

    for number in range(_SAVES):
        for kind, size in (("one", count), ("many", 1)):
            model = _make_model(count)
            params = list(model.parameters())
            optimizers = [torch.optim.Adam(params[start : start + size]) for start in range(0, count, size)]
            _step(model, *optimizers)
            for name, work in (("save", save), ("load", load)):
                began = time.perf_counter()
                work(model, optimizers, folder / f"{kind}-{number}")
                seconds.setdefault(f"{name} {kind}", []).append(time.perf_counter() - began)
    return seconds


def _make_model(count: int) -> nn.Module:
    from torch import nn

    shapes = (_SHAPES[number % len(_SHAPES)] for number in range(count))
    layers = [nn.Linear(columns, rows, bias=False) for rows, columns in shapes]
    return nn.Sequential(*(nn.Sequential(*layers[start : start + 50]) for start in range(0, count, 50)))


def _step(model: nn.Module, *optimizers: Any) -> None:
    import torch

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


#: What is measured, by name: the function, and the rows of its table, as an operation, the name of its seconds, which
#: of them, those that it is shown beside, and the word for these.
_WORKLOADS: dict[str, tuple[Callable[..., dict[str, list[float]]], list[tuple[str, str, slice, str, str]]]] = {
    "adam": (
        measure_adam,
        [
            ("first save: blocked", "save", slice(1), "copy", "a clone of each tensor"),
            ("later saves: blocked", "save", slice(1, None), "copy", "a clone of each tensor"),
        ],
    ),
    "optimizers": (
        measure_optimizers,
        [
            ("first save", "save many", slice(1), "save one", "one optimizer"),
            ("later saves", "save many", slice(1, None), "save one", "one optimizer"),
            ("first load", "load many", slice(1), "load one", "one optimizer"),
            ("later loads", "load many", slice(1, None), "load one", "one optimizer"),
        ],
    ),
}


def _make_rows(workload: str, world: int, rounds: Sequence[list[dict[str, list[float]]]]) -> list[tuple[str, ...]]:
    """Return a row for each operation; ``rounds`` are those of the old revision and those of the new."""
    rows = []
    for operation, name, which, base, word in _WORKLOADS[workload][1]:
        shown: list[str] = []
        for each in rounds:
            seconds = [value for one in each for value in one[name][which]]
            # the first copy finds memory that is not the allocator's yet, as each copy of a training's state may
            beside = [value for one in each for value in one[base][which if base != "copy" else slice(1, None)]]
            median, other = statistics.median(seconds), statistics.median(beside)
            shown += [f"{median:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) / {other:.3f}", f"{median / other:.1f}"]
        rows.append((workload, str(world), operation, word, *shown))
    return rows


def _find_slowest(ranks: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank, by kind."""
    return {kind: [max(each) for each in zip(*(rank[kind] for rank in ranks), strict=True)] for kind in ranks[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("old", help="a revision of git, or a folder with a checkout")
    parser.add_argument("new", help="the same; . for this checkout as it is")
    parser.add_argument("--workloads", nargs="+", choices=list(_WORKLOADS), default=list(_WORKLOADS))
    parser.add_argument("--parameters", type=int, default=20_000, help="of the model of adam")
    parser.add_argument("--optimizers", type=int, default=400, help="of the model of optimizers")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="of adam")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where checkpoints are written")
    given = parser.parse_args(arguments)

    from benchmarks.machine import describe
    from benchmarks.revisions import check_out, run_rounds
    from shardckpt.cli.table import table

    counts = {"adam": given.parameters, "optimizers": given.optimizers}
    with tempfile.TemporaryDirectory(prefix="shardckpt-training-", dir=given.directory) as name:
        folder = Path(name).resolve()
        checkouts = [check_out(given.old, folder / "old"), check_out(given.new, folder / "new")]
        print("\n".join(describe(folder)))
        rows: list[tuple[str, ...]] = []
        for workload in given.workloads:
            for world in given.ranks if workload == "adam" else [1]:
                arguments = (workload, counts[workload])
                answers = run_rounds(__file__, checkouts, folder, world, arguments, given.rounds)
                rounds = [list(map(_find_slowest, each)) for each in answers]
                rows += _make_rows(workload, world, rounds)
    print(f"{counts}; medians of {given.rounds} rounds in turns (from, to) / those that they are beside, and the ratio")
    print(f"old: {given.old}, new: {given.new}; both sync each file, the manifest and the directories of a save")
    print(table(_HEADERS, rows))


def _answer(rank: str, world: str, folder: str, workload: str, count: str) -> None:
    """Print a rank's seconds, for the process that compares."""
    seconds = _WORKLOADS[workload][0](Path(folder), int(rank), int(world), int(count))
    print(json.dumps([sys.modules["shardckpt"].__file__, seconds]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.path.remove(str(Path(__file__).resolve().parent))  # the benchmarks' own modules, in the way of others
        _answer(*sys.argv[2:])
    else:
        main()

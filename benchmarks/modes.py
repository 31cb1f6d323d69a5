"""What a training loop feels of a CheckpointManager's saves, by async mode: how long it is blocked, and slowed down.

A step is matrix products on one thread. It is timed alone, and while a checkpoint is being written; blocked is the time
that ``save`` takes, beside the copy of the same state into memory that is touched already, by as many threads as there
are cores. Modes and steps are interleaved; files are synced, as always. One process without a process group, or
``--ranks`` of gloo under FSDP2, each with its part of the state: of every round the slowest rank counts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.machine import describe
from shardckpt.cli.table import table
from shardckpt.manager import AsyncMode, CheckpointConfig, CheckpointManager
from shardckpt.testing.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WIDTH = 1024
_THREADS = 2
#: Seconds that all rounds of all ranks may take.
_LIMIT = 1800.0
_HEADERS = ("mode", "blocked (s)", "of a copy", "step alone (ms)", "while writing", "ratio", "whole (s)")


class _Figures:
    """The measurements of a mode on a rank, in seconds by round; a copy is of all of its state."""

    def __init__(self) -> None:
        self.copy: list[float] = []
        self.blocked: list[float] = []
        self.quiet: list[float] = []
        self.slowed: list[float] = []
        self.whole: list[float] = []

    def slowest(self, others: Sequence[_Figures]) -> _Figures:
        """Return the figures of the slowest rank in each round; steps are those of this rank."""
        found = _Figures()
        for name in ("copy", "blocked", "whole"):
            setattr(found, name, [max(each) for each in zip(*(getattr(rank, name) for rank in others), strict=True)])
        found.quiet, found.slowed = self.quiet, self.slowed
        return found


class _Job:
    """A training with a state of a given size, and a manager for it.

    Args:
        folder: For its checkpoints.
        mode: How it saves.
        model: The state.
    """

    def __init__(self, folder: Path, mode: AsyncMode, model: torch.nn.Module) -> None:
        self.figures = _Figures()
        config = CheckpointConfig(folder=folder / mode.value, interval=1, async_mode=mode, keep_latest_k=2)
        self._manager = CheckpointManager(config, {"model": model})
        self._threads = max(1, _THREADS // dist.get_world_size()) if dist.is_initialized() else _THREADS
        parameters = [parameter.data for parameter in model.parameters()]
        self._state = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
        self._copies = [torch.zeros_like(tensor) for tensor in self._state]
        self._activations = torch.randn(_WIDTH, _WIDTH)
        self._weight = torch.randn(_WIDTH, _WIDTH) / _WIDTH**0.5
        self._step = 0

    def round(self, steps: int, *, counts: bool) -> None:
        """Measure the copy, quiet steps, a save, and steps until it is durable."""
        figures = self.figures if counts else _Figures()
        if dist.is_initialized():
            dist.barrier()
        figures.copy.append(_seconds(self._copy))
        figures.quiet += [_seconds(self._train) for _ in range(steps)]
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        self._step += 1
        self._manager.save(self._step)
        figures.blocked.append(time.perf_counter() - began)
        while self._manager.steps()[-1:] != [self._step]:
            figures.slowed.append(_seconds(self._train_and_commit))
        figures.whole.append(time.perf_counter() - began)
        self._manager.wait()

    def close(self) -> None:
        """End the manager."""
        self._manager.close()

    def _copy(self) -> None:
        pairs = list(zip(self._copies, self._state, strict=True))
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(_copy_all, (pairs[thread :: self._threads] for thread in range(self._threads))))

    def _train_and_commit(self) -> None:
        self._train()
        self._manager.maybe_wait_for_staging()

    def _train(self) -> None:
        for _ in range(4):
            self._activations = torch.tanh(self._activations @ self._weight)


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for copy, tensor in pairs:
        copy.copy_(tensor)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _row(mode: AsyncMode, figures: _Figures) -> Sequence[str]:
    blocked, copy = statistics.median(figures.blocked), statistics.median(figures.copy)
    quiet = statistics.median(figures.quiet)
    slowed = statistics.median(figures.slowed) if figures.slowed else None
    while_writing = ("-", "-") if slowed is None else (f"{slowed * 1000:.1f}", f"{slowed / quiet:.2f}")
    whole = f"{statistics.median(figures.whole):.2f}"
    return (mode.value, f"{blocked:.3f}", f"{blocked / copy:.2f}", f"{quiet * 1000:.1f}", *while_writing, whole)


def measure(folder: Path, mib: int, tensors: int, rounds: int) -> dict[AsyncMode, _Figures]:
    """Collective where there is a process group: return this rank's figures by mode."""
    torch.set_num_threads(1)
    columns = mib * (1 << 18) // tensors // _WIDTH
    model = torch.nn.Sequential(*(torch.nn.Linear(columns, _WIDTH, bias=False) for _ in range(tensors)))
    if dist.is_initialized():
        fully_shard(model)
    jobs = {mode: _Job(folder, mode, model) for mode in AsyncMode}
    for number in range(-1, rounds):
        for job in jobs.values():
            job.round(20, counts=number >= 0)
    for job in jobs.values():
        job.close()
    return {mode: job.figures for mode, job in jobs.items()}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--tensors", type=int, default=16, help="in so many tensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=0, help="so many processes; 0: this one, without a process group")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardckpt-modes-", dir=given.directory))
    work = (folder, given.mib, given.tensors, given.rounds)
    pool = RankPool(max(1, given.ranks))
    try:
        ranks = pool.run(given.ranks, measure, *work, timeout=_LIMIT) if given.ranks else [measure(*work)]
        lines = describe(folder)
    finally:
        pool.close()
        shutil.rmtree(folder)
    print("\n".join(lines))
    processes = f"{given.ranks} ranks" if given.ranks else "one process"
    print(
        f"{given.mib} MiB in {given.tensors} tensors, {processes}, median of {given.rounds} rounds; steps on one thread"
    )
    rows = [_row(mode, ranks[0][mode].slowest([rank[mode] for rank in ranks])) for mode in AsyncMode]
    print(table(_HEADERS, rows))


if __name__ == "__main__":
    main()

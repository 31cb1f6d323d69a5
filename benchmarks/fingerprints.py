"""How fast fingerprints are computed, by one thread, beside a copy of the same tensors, and what they cost a save.

Best and median of rounds; saves with and without fingerprints take turns.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing
from shardckpt.cli.table import table
from shardckpt.mapping import ShardedTensor
from shardckpt.tensors.fingerprint import sum_boxes

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 15
MIB = 1 << 20
SAVES = 5
SAVED_TENSORS = 32


def _make_states() -> dict[str, list[torch.Tensor]]:
    return {
        "float32, 4096 columns": [torch.randn(4096, 4096)],
        "bfloat16, 4096 columns": [torch.randn(8192, 4096).bfloat16()],
        "bfloat16, 1001 columns": [torch.randn(32_000, 1001).bfloat16()],
        "float32, one axis": [torch.randn(16 * MIB)],
        "float32, 4 columns": [torch.randn(MIB, 4)],
        "2,000 of 16 KiB": [torch.randn(64, 64) for _ in range(2000)],
        "10,000 of 1 KiB": [torch.randn(256) for _ in range(10_000)],
    }


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _sum(tensors: list[torch.Tensor]) -> None:
    sum_boxes([(tensor, (0,) * tensor.dim(), tensor.shape) for tensor in tensors])


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _measure_saves(folder: Path) -> list[tuple[str, ...]]:
    """Save the same tensors with and without fingerprints in turns; return a row for each: wall and CPU seconds."""
    values = {f"w{number}": torch.randn(4096, 1024) for number in range(SAVED_TENSORS)}
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(SAVES):
        for asked, times in found.items():
            cpu = time.process_time()
            wall = _seconds(
                lambda: dist_checkpointing.save(state, folder / "step", overwrite=True, fingerprints=asked)  # noqa: B023 - called here
            )
            times.append((wall, time.process_time() - cpu))
    return [
        ("with fingerprints" if asked else "without", *(f"{statistics.median(each):.2f}" for each in zip(*times)))  # noqa: B905 - pairs
        for asked, times in found.items()
    ]


def main() -> None:
    """Print two tables."""
    torch.set_num_threads(1)
    rows = []
    for name, tensors in _make_states().items():
        targets = [torch.empty_like(tensor) for tensor in tensors]
        sums, copies = [], []
        for _ in range(ROUNDS):
            sums.append(_seconds(lambda: _sum(tensors)))  # noqa: B023 - called here
            copies.append(_seconds(lambda: _copy(tensors, targets)))  # noqa: B023 - called here
        size = sum(tensor.nbytes for tensor in tensors) / 1e9
        median = statistics.median(sums)
        ratio = median / statistics.median(copies)
        rows.append((name, f"{size / min(sums):.2f}", f"{size / median:.2f}", f"{ratio:.1f}"))
    print(
        f"{platform.platform()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {ROUNDS} rounds"
    )
    print(table(("tensors", "best GB/s", "median GB/s", "times a copy"), rows))
    with tempfile.TemporaryDirectory() as folder:
        header = (f"{SAVED_TENSORS * 16} MiB, median of {SAVES} saves", "seconds", "CPU seconds")
        print(table(header, _measure_saves(Path(folder))))


if __name__ == "__main__":
    main()

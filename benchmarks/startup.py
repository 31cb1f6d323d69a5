"""How long the command takes to answer, against an empty Python: medians of interleaved runs, in milliseconds.

``ls``, ``inspect`` and ``diff`` are of checkpoints with 100,000 tensors and stored fingerprints, in both formats: two
are equal; the third differs in ten tensors and in the common state, whose values ``diff`` reads with torch.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from shardckpt import dist_checkpointing
from shardckpt.cli.table import table
from shardckpt.mapping import ShardedTensor

ROUNDS = 5
TENSORS = 100_000
DIFFERENT = 10
FORMATS = ("torch_dist", "safetensors")


def _save(folder: Path, backend: str, step: int) -> None:
    """Save small tensors; those of a later step differ in some."""
    values = [
        torch.full((4,), float(number + step * (number % (TENSORS // DIFFERENT) == 0))) for number in range(TENSORS)
    ]
    state: dict[str, object] = {
        key: ShardedTensor.from_rank_offsets(key, value)
        for number, value in enumerate(values)
        for key in [f"decoder.layers.{number // 100}.experts.{number % 100}.weight"]
    }
    dist_checkpointing.save(state | {"iteration": step}, folder, (backend, 1), fingerprints=True)


def _list_commands(folder: Path) -> dict[str, list[str]]:
    """Return the arguments of Python by the name of the row."""
    verb = ["-m", "shardckpt"]
    commands = {
        "python -c pass": ["-c", "pass"],
        "import shardckpt": ["-c", "import shardckpt"],
        "shardckpt --help": [*verb, "--help"],
        "shardckpt strategies": [*verb, "strategies"],
        "import torch": ["-c", "import torch"],
    }
    for backend in FORMATS:
        one, equal, other = (str(folder / f"{backend}-{name}") for name in ("one", "equal", "other"))
        commands |= {
            f"ls, {backend}": [*verb, "ls", one],
            f"inspect, {backend}": [*verb, "inspect", one],
            f"diff of two that are equal, {backend}": [*verb, "diff", one, equal],
            f"diff, {DIFFERENT} tensors differ, {backend}": [*verb, "diff", one, other],
        }
    return commands


def _measure_milliseconds(arguments: list[str], caches: Path) -> float:
    """Run Python with compiled modules in a folder of their own, as an installed package has them."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(caches)}
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=False, capture_output=True, env=environment)
    return (time.perf_counter() - start) * 1000


def main() -> None:
    """Print one table."""
    with tempfile.TemporaryDirectory(prefix="shardckpt-startup-") as name:
        folder = Path(name)
        for backend in FORMATS:
            for step, kind in enumerate(("one", "equal", "other")):
                _save(folder / f"{backend}-{kind}", backend, step // 2)
        commands = _list_commands(folder)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(ROUNDS + 1):
            for row, arguments in commands.items():
                taken = _measure_milliseconds(arguments, folder / "caches")
                if number:  # the first compiles the modules
                    times[row].append(taken)
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["python -c pass"]
    rows = [(name, f"{value:.0f}", f"{value / base:.1f}") for name, value in medians.items()]
    print(
        f"{platform.platform()}, Python {platform.python_version()}, median of {ROUNDS}, load {os.getloadavg()[0]:.1f}"
    )
    print(table(("command", "ms", "times empty Python"), rows))


if __name__ == "__main__":
    main()

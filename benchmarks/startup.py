"""How long the command takes to answer, against an empty Python: medians of interleaved runs, in milliseconds."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time

from shardckpt.cli.table import table

ROUNDS = 9
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import shardckpt": ["-c", "import shardckpt"],
    "shardckpt --help": ["-m", "shardckpt", "--help"],
    "shardckpt strategies": ["-m", "shardckpt", "strategies"],
    "import torch": ["-c", "import torch"],
}


def _milliseconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return (time.perf_counter() - start) * 1000


def main() -> None:
    """Print one table."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(_milliseconds(arguments))
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["python -c pass"]
    rows = [(name, f"{value:.0f}", f"{value / base:.1f}") for name, value in medians.items()]
    print(f"{platform.platform()}, Python {platform.python_version()}, median of {ROUNDS}")
    print(table(("command", "ms", "times empty Python"), rows))


if __name__ == "__main__":
    main()

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor
from tests.maintenance.merge import LEAST, MIB, average, whole

if TYPE_CHECKING:
    from collections.abc import Sequence


def save_sources(folder: Path, count: int, rows: int, columns: int) -> list[str]:
    """Checkpoints of one tensor, in two formats: whole, in rows that end anywhere, and in columns."""
    names = [f"{number}" for number in range(count)]
    for number, name in enumerate(names):
        values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(number))
        first = rows // 3 + 1
        cut: Any = {
            0: whole("w", values),
            1: [
                ShardedTensor("w", part.contiguous(), part.dtype, tuple(part.shape), (rows, columns), (low, 0), None)
                for part, low in ((values[:first], 0), (values[first:], first))
            ],
            2: [
                ShardedTensor.from_rank_offsets("w", part.contiguous(), (1, n, 2))
                for n, part in enumerate(values.chunk(2, 1))
            ],
        }[number % 3]
        dc.save({"w": cut}, folder / name, ["torch_dist", "safetensors"][number % 2])
        del values, cut
    return names


def assert_merged(folder: Path, names: Sequence[str], merged: str) -> None:
    """A merge equals numpy's average in float64, rounded once."""
    with ExitStack() as stack:
        new, *sources = (stack.enter_context(dc.open_checkpoint(folder / name)) for name in (merged, *names))
        for row in range(0, new["w"].shape[0], 256):
            parts = [source["w"][row : row + 256] for source in sources]
            assert np.array_equal(new["w"][row : row + 256].numpy(), average(parts, [1.0] * len(names)))


#: Merges small checkpoints first, so that all imports are done; prints by how many bytes the memory then grows, and how
#: many are read.
MEASURE = """
import sys
from pathlib import Path
from shardckpt.maintenance import merge_checkpoints

def peak():
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) << 10

def count():
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

folder, memory = Path(sys.argv[1]), int(sys.argv[2])
sources = [folder / name for name in sys.argv[3:]]
merge_checkpoints([folder / "small"] * 2, folder / "small-new", "safetensors", memory_budget=memory)
Path("/proc/self/clear_refs").write_text("5")
before, read = peak(), count()
merge_checkpoints(sources, folder / "new", "safetensors", accumulate="fp64", memory_budget=memory)
print(peak() - before, count() - read)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process's memory is Linux's")
@pytest.mark.parametrize(
    ("count", "size", "most"),
    [
        pytest.param(3, 96 * MIB, 96 * MIB, marks=pytest.mark.ci),
        pytest.param(10, 1 << 30, 128 * MIB, marks=[pytest.mark.ci, pytest.mark.proof, pytest.mark.timeout(2400)]),
    ],
    ids=["3x96MiB", "10x1GiB"],
)
def test_memory_is_bounded(tmp_path: Path, count: int, size: int, most: int) -> None:
    """Checkpoints far larger than the memory are merged within it, read once, and equal numpy in fp64, rounded once."""
    dc.save({"w": whole("w", torch.ones(3))}, tmp_path / "small")
    try:
        names = save_sources(tmp_path, count, size // (4 * 4096), 4096)
        command = [sys.executable, "-c", MEASURE, str(tmp_path), str(LEAST), *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
        grown, read = map(int, done.stdout.split())
        assert grown < most
        assert read <= 1.1 * (count + 1) * size
        assert_merged(tmp_path, names, "new")
    finally:
        for path in tmp_path.iterdir():  # pytest keeps the folders of three runs, and these are large
            shutil.rmtree(path)

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor
from tests.maintenance.proof import whole

MIB = 1 << 20


#: torch's threads wait for each other by spinning: where other processes have the cores, one is many times as fast.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


#: Converts a small checkpoint first, so that all imports are done; prints by how many bytes the memory then grows.
MEASURE = """
import sys
from pathlib import Path
from shardckpt.maintenance import convert_checkpoint

def peak():
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) << 10

small, large, to, memory = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
convert_checkpoint(small, small.with_suffix(".new"), to, memory_budget=memory)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
convert_checkpoint(large, large.with_suffix(".new"), to, memory_budget=memory)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process's memory is Linux's")
@pytest.mark.parametrize(
    ("source", "to", "elements"),
    [
        pytest.param("hf", "safetensors", 460, marks=pytest.mark.proof),
        ("hf", "torch", 170),
        pytest.param("torch", "dcp", 170, marks=pytest.mark.proof),
        pytest.param("torch", "hf", 170, marks=pytest.mark.proof),
        pytest.param("columns", "ep", 170, marks=pytest.mark.proof),
    ],
)
def test_gibibytes_take_256_mebibytes(tmp_path: Path, source: str, to: str, elements: int) -> None:
    """2 GiB (or 0.75) in one large tensor, a strided one and small ones raise the peak by no more than the budget."""
    for name, count in (("small", 1), ("large", elements * MIB)):
        tensors = {"large": torch.rand(count), "middle": torch.rand(count // 10 + 1, 1)}
        tensors |= {f"small.{n}": torch.rand(count // 50_000 + 1) for n in range(500)}
        path = tmp_path / name
        if source == "torch":
            torch.save(tensors, path)
        elif source == "columns":
            state = {
                key: [ShardedTensor.from_rank_offsets(key, part, (0, n, 4)) for n, part in enumerate(tensor.chunk(4))]
                if key == "large"
                else whole(key, tensor)
                for key, tensor in (tensors | {"large": torch.rand(4, count // 4 + 1)}).items()
            }
            dc.save(state, path)
        else:
            path.mkdir()
            safetensors.torch.save_file(tensors, path / "model.safetensors")
    del tensors
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), to, str(256 * MIB)]
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=900, check=True)
    assert int(done.stdout) < 256 * MIB

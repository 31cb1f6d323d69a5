"""A Hugging Face folder by every door, in time and memory: ``python -m benchmarks.hub``.

A checkpoint of bfloat16 tensors of 64 MiB. Each measurement is a process of its own, the doors take turns, and memory
is the most that the process has had resident beyond what it had before the door was opened. The page cache is warm.
Ours make their files durable (fsync) and check the digests of what they read; safetensors' ``save_file`` and torch's
consolidation of a folder that its HuggingFaceStorageWriter has written do neither.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.machine import describe
from shardckpt import dist_checkpointing
from shardckpt.cli.table import table
from shardckpt.mapping import ShardedTensor

MIB = 1 << 20
SHAPE = (8192, 4096)


def _make_state(count: int) -> dict[str, ShardedTensor]:
    values = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE).bfloat16()
    names = [f"model.layers.{number}.weight" for number in range(count)]
    return {name: ShardedTensor.from_rank_offsets(name, values + number) for number, name in enumerate(names)}


def _export(source: Path, target: Path) -> None:
    from shardckpt.huggingface import export_to_huggingface

    export_to_huggingface(source / "checkpoint", target)


def _convert(source: Path, target: Path) -> None:
    from shardckpt.maintenance import convert_checkpoint

    convert_checkpoint(source / "checkpoint", target, "hf", memory_budget=32 * MIB)


def _weights(source: Path, target: Path) -> None:
    """What an engine does that takes weights one by one; nothing is written."""
    with dist_checkpointing.open_checkpoint(source / "checkpoint") as checkpoint:
        for _ in checkpoint.weights():
            pass
    target.mkdir()


def _save_file(source: Path, target: Path) -> None:
    from safetensors.torch import save_file

    with dist_checkpointing.open_checkpoint(source / "checkpoint") as checkpoint:
        values = dict(checkpoint.weights())
    target.mkdir()
    save_file(values, target / "model.safetensors", {"format": "pt"})


def _consolidate(source: Path, target: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    target.mkdir()
    mapping = dict.fromkeys(json.loads((source / "names.json").read_text()), 1)
    consolidate_safetensors_files(str(source / "sharded"), str(target), mapping)


DOORS = {
    "export": _export,
    "convert --to hf, which proves it": _convert,
    "weights(), nothing written": _weights,
    "safetensors save_file": _save_file,
    "torch's consolidation": _consolidate,
}


def _prepare(folder: Path, count: int) -> None:
    """Write what the doors read: a checkpoint of ours, and a sharded folder of torch's writer."""
    import torch.distributed.checkpoint as dcp

    state = _make_state(count)
    dist_checkpointing.save(dict(state), folder / "checkpoint")
    (folder / "names.json").write_text(json.dumps([*state]))
    tensors = {name: shard.data for name, shard in state.items()}
    writer = dcp.HuggingFaceStorageWriter(str(folder / "sharded"), save_distributed=True)
    dcp.save(tensors, storage_writer=writer)


def _measure(door: str, source: Path, target: Path) -> None:
    """Open one door, and print seconds and bytes."""
    DOORS[door](source / "warm", target.with_name("out-warm"))  # imports, threads and pools are there before
    gc.collect()
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    rest = _read_kib(status, "VmRSS")
    start = time.perf_counter()
    DOORS[door](source, target)
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, (_read_kib(status, "VmHWM") - rest) * 1024]))


def _read_kib(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{name}:"))


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.hub", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="of weights (2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where folders are written")
    parser.add_argument("--measure", nargs=3, metavar=("DOOR", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        _measure(options.measure[0], *map(Path, options.measure[1:]))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        print("\n".join(describe(folder)))
        (folder / "warm").mkdir()
        _prepare(folder / "warm", 1)
        _prepare(folder, max(1, round(options.gib * 16)))
        found: dict[str, list[tuple[float, int]]] = {door: [] for door in DOORS}
        for number in range(options.rounds):
            doors = [*DOORS][number % len(DOORS) :] + [*DOORS][: number % len(DOORS)]
            for door in doors:
                command = [sys.executable, "-m", "benchmarks.hub", "--measure", door, name, str(folder / "out")]
                answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[door].append(tuple(json.loads(answer.splitlines()[-1])))
                shutil.rmtree(folder / "out")
                shutil.rmtree(folder / "out-warm", ignore_errors=True)
    base = statistics.median(seconds for seconds, _ in found["safetensors save_file"])
    rows = []
    for door, values in found.items():
        seconds, memory = (statistics.median(column) for column in zip(*values, strict=True))
        rows.append((door, f"{seconds:.2f}", f"{seconds / base:.2f}", f"{memory / MIB:.0f}"))
    print(table(("door", "seconds, median", "ratio to save_file", "MiB beyond rest, median"), rows))


if __name__ == "__main__":
    main()

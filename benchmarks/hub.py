"""A Hugging Face folder by every door, in time and memory: ``python -m benchmarks.hub``.

A checkpoint of bfloat16 tensors of 64 MiB, or of ``--tensor-mib``. Each measurement is a process of its own, the doors
take turns, and memory is the most that the process has had resident beyond what it had before the door was opened; a
save's state is there before. The page cache is warm. Ours make their files durable (fsync) and check the digests of
what they read; safetensors' ``save_file`` and torch's consolidation of a folder that its HuggingFaceStorageWriter has
written do neither.
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
from typing import TYPE_CHECKING

import torch

from benchmarks.machine import describe
from shardckpt import dist_checkpointing
from shardckpt.cli.table import table
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
COLUMNS = 4096


def _make_state(count: int, mib: int) -> dict[str, ShardedTensor]:
    values = torch.arange(mib * MIB // 2, dtype=torch.float32).reshape(-1, COLUMNS).bfloat16()
    names = [f"model.layers.{number}.weight" for number in range(count)]
    return {name: ShardedTensor.from_rank_offsets(name, values + number) for number, name in enumerate(names)}


def _load(source: Path) -> dict[str, ShardedTensor]:
    with dist_checkpointing.open_checkpoint(source / "checkpoint") as checkpoint:
        return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in checkpoint.weights()}


def _export(source: Path, target: Path) -> Iterator[None]:
    from shardckpt.huggingface import export_to_huggingface

    yield
    export_to_huggingface(source / "checkpoint", target)


def _convert(source: Path, target: Path) -> Iterator[None]:
    from shardckpt.maintenance import convert_checkpoint

    yield
    convert_checkpoint(source / "checkpoint", target, "hf", memory_budget=32 * MIB)


def _merge(source: Path, target: Path) -> Iterator[None]:
    from shardckpt.maintenance import merge_checkpoints

    yield
    merge_checkpoints([source / "checkpoint"] * 2, target, "hf", memory_budget=32 * MIB)


def _contiguous(source: Path, target: Path) -> Iterator[None]:
    from shardckpt_safetensors import SafetensorsSaveShardedStrategy

    state = _load(source)
    yield
    dist_checkpointing.save(state, target, SafetensorsSaveShardedStrategy(layout="contiguous"))


def _weights(source: Path, target: Path) -> Iterator[None]:
    """What an engine does that takes weights one by one; nothing is written."""
    yield
    with dist_checkpointing.open_checkpoint(source / "checkpoint") as checkpoint:
        for _ in checkpoint.weights():
            pass
    target.mkdir()


def _save_file(source: Path, target: Path) -> Iterator[None]:
    from safetensors.torch import save_file

    state = {name: shard.data for name, shard in _load(source).items()}
    yield
    target.mkdir()
    save_file(state, target / "model.safetensors", {"format": "pt"})


def _consolidate(source: Path, target: Path) -> Iterator[None]:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    with dist_checkpointing.open_checkpoint(source / "checkpoint") as checkpoint:
        mapping = dict.fromkeys(checkpoint, 1)
    yield
    target.mkdir()
    consolidate_safetensors_files(str(source / "sharded"), str(target), mapping)


#: Each makes what a process has at rest up to its ``yield``, and then opens the door.
DOORS = {
    "export": _export,
    "convert --to hf, which proves it": _convert,
    "merge of two --to hf": _merge,
    'save, layout="contiguous"': _contiguous,
    "weights(), nothing written": _weights,
    "safetensors save_file": _save_file,
    "torch's consolidation": _consolidate,
}


def _prepare(folder: Path, count: int, mib: int) -> None:
    """Write what the doors read: a checkpoint of ours, and a sharded folder of torch's writer."""
    import torch.distributed.checkpoint as dcp

    state = _make_state(count, mib)
    dist_checkpointing.save(dict(state), folder / "checkpoint")
    tensors = {name: shard.data for name, shard in state.items()}
    writer = dcp.HuggingFaceStorageWriter(str(folder / "sharded"), save_distributed=True)
    dcp.save(tensors, storage_writer=writer)


def _measure(door: str, source: Path, target: Path) -> None:
    """Open one door, and print seconds and bytes."""
    # imports, threads and pools are there before
    for _ in DOORS[door](source / "warm", target.with_name("out-warm")):
        pass
    opening = DOORS[door](source, target)
    next(opening)
    gc.collect()
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    rest = _read_kib(status, "VmRSS")
    start = time.perf_counter()
    next(opening, None)
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, (_read_kib(status, "VmHWM") - rest) * 1024]))


def _read_kib(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{name}:"))


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.hub", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="of weights (2)")
    parser.add_argument("--tensor-mib", type=int, default=64, help="of a tensor (64)")
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
        _prepare(folder / "warm", 1, options.tensor_mib)
        _prepare(folder, max(1, round(options.gib * 1024 / options.tensor_mib)), options.tensor_mib)
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

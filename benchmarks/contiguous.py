"""What contiguous tensors cost: saves in boxes and contiguous in turns, ``python -m benchmarks.contiguous``.

A training's weights in bf16 and two moments in fp32, on 4 ranks. Rows: FSDP, each rank has rows of every tensor; and
HSDP, two copies of halves. Columns: as with tensor parallelism, where contiguous tensors need an exchange. Numbers are
the median of the rounds, of which each measures all variants; the time is that of the slowest rank, with the commit.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.workloads import specs
from shardckpt import dist_checkpointing
from shardckpt.mapping import ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy

PAGE = 4096
#: By layout: the axis that is cut, into how many parts, and how many copies there are of each.
LAYOUTS = {"fsdp": (0, 4, 1), "hsdp": (0, 2, 2), "columns": (1, 4, 1)}
VARIANTS = ("boxes", "contiguous", "auto")


def make_state(layout: str, scale: float, *, moments: bool) -> dict[str, Any]:
    """Return this rank's shards of a training's state: fresh memory, filled."""
    axis, parts, _ = LAYOUTS[layout]
    rank = dist.get_rank()
    part, copy = rank % parts, rank // parts
    found = {}
    for spec in specs("llama", scale):
        if spec.dtype == "float32" and not moments:
            continue
        section = "model" if spec.dtype == "bfloat16" else "optimizer"
        cut = axis if len(spec.shape) > axis else 0
        shape = list(spec.shape)
        shape[cut] //= parts
        data = allocate(shape, getattr(torch, spec.dtype)).fill_(rank)
        key = f"{section}.{spec.key}"
        found[key] = ShardedTensor.from_rank_offsets(key, data, (cut, part, parts), replica_id=copy)
    return found


def allocate(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory that begins on a page, as the staging memory has it to which tensors of a device are copied."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE
    return memory[first : first + nbytes].view(dtype).view(shape)


def measure(rank: int, options: argparse.Namespace, store: str, folder: str) -> None:
    """Run the rounds on one rank; the first prints the table."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    place = Path(folder)
    if rank == 0:
        print("| layout | state | variant | median s | ratio to boxes | rounds |\n|---|---|---|---|---|---|")
    for layout in options.layouts:
        for moments in (True, False):
            state = make_state(layout, options.scale, moments=moments)
            savers = {v: SafetensorsSaveShardedStrategy(layout=v, prefix="model.") for v in VARIANTS}  # type: ignore[arg-type]
            times: dict[str, list[float]] = {v: [] for v in VARIANTS}
            for number in range(options.rounds + 1):
                for variant in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                    dist.barrier()
                    start = time.perf_counter()
                    dist_checkpointing.save(state, place / variant, savers[variant])
                    seconds = torch.tensor(time.perf_counter() - start)
                    dist.all_reduce(seconds, dist.ReduceOp.MAX)
                    if number:  # the first plans, and touches memory
                        times[variant].append(float(seconds))
                    if rank == 0:
                        shutil.rmtree(place / variant)
            if rank == 0:
                for variant in VARIANTS:
                    ratio = statistics.median(
                        mine / boxes for mine, boxes in zip(times[variant], times["boxes"], strict=True)
                    )
                    what = "weights and moments" if moments else "weights"
                    print(
                        f"| {layout} | {what} | {variant} | {statistics.median(times[variant]):.3f} | {ratio:.2f} "
                        f"| {options.rounds} |",
                        flush=True,
                    )
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line, and start the ranks."""
    parser = argparse.ArgumentParser(prog="benchmarks.contiguous", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scale", type=float, default=0.25, help="1 is 2 GiB, a third of it weights")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--directory", help="where checkpoints are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder, tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(measure, (options, f"{store}/ranks", folder), nprocs=4)


if __name__ == "__main__":
    main()

"""How the golden zarr checkpoints were written: by an old megatron-core itself, on gloo, without an accelerator.

``PYTHONPATH=site python tests/golden/write_zarr.py DIRECTORY RANKS``, where ``site`` has, by ``pip install --no-deps
--target site``: megatron-core of 0.5 to 0.15, ``zarr<3``, ``numcodecs<0.16``, asciitree, deprecated, wrapt, fasteners,
tensorstore, ml_dtypes, einops, packaging and ``setuptools<81``; torch and numpy are those of the tests.
It imports nothing of shardckpt.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

#: Every tensor: its global shape and dtype; its values are ``arange(numel)`` in that dtype.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "decoder.layers.0.mlp.linear_fc1.weight": ((8, 6), torch.float32),
    "decoder.layers.0.mlp.linear_fc2.weight": ((4, 8), torch.bfloat16),
    "decoder.final_layernorm.weight": ((5,), torch.float32),
    "decoder.layers.self_attention.linear_qkv.weight": ((2, 4, 4), torch.bfloat16),
    "grid": ((4, 6), torch.float16),
    "mask": ((4, 3), torch.bool),
    "optimizer.step": ((3,), torch.int64),
    "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight": ((8, 6), torch.float32),
    "optimizer.distributed.dp_group_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg": (
        (12,),
        torch.float32,
    ),
    "phases": ((2, 3), torch.complex64),
}
COMMON = {"iteration": 17, "args": {"hidden_size": 8, "lr": 0.1, "names": ["a", "b"]}}


def global_tensor(key: str) -> torch.Tensor:
    """Return a global tensor."""
    shape, dtype = TENSORS[key]
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def describe(mapping: Any, rank: int, world: int) -> dict[str, Any]:
    """Return the state dict of a rank in Megatron's words."""
    tensor = mapping.ShardedTensor.from_rank_offsets
    full = {key: global_tensor(key) for key in TENSORS}
    fc1, fc2, norm, qkv, grid, mask, step, average, bucket, phases = full
    flat = [slice(0, 20), slice(20, 48)] if world > 1 else [slice(0, 48)]  # of unequal size
    return {
        "fc1": tensor(fc1, full[fc1].chunk(world)[rank], (0, rank, world)),
        "fc2": tensor(fc2, full[fc2].chunk(world, 1)[rank].contiguous(), (1, rank, world)),
        "norm": tensor(norm, full[norm], replica_id=rank),
        "layers": [  # two layers on every rank, by a prepended axis
            tensor(qkv, full[qkv][n].chunk(world)[rank], (0, n, 2), (1, rank, world), prepend_axis_num=1)
            for n in range(2)
        ],
        "grid": [  # two shards a rank
            tensor(grid, full[grid].chunk(2)[n].chunk(world, 1)[rank].contiguous(), (0, n, 2), (1, rank, world))
            for n in range(2)
        ],
        "mask": tensor(mask, full[mask].chunk(world)[rank], (0, rank, world)),
        "step": tensor(step, full[step], replica_id=(0, rank)),
        "average": mapping.ShardedTensor(
            average,
            full[average].flatten()[flat[rank]],
            torch.float32,
            local_shape=(8, 6),
            global_shape=(8, 6),
            global_offset=(0, 0),
            axis_fragmentations=(1, 1),
            flattened_range=flat[rank],
        ),
        "bucket": tensor(bucket, full[bucket].chunk(world)[rank], (0, rank, world)),
        "phases": tensor(phases, full[phases], replica_id=rank),
        "extra": mapping.ShardedObject(
            "decoder.layers.0._extra_state", {"amax": torch.arange(3.0) + rank, "rank": rank}, (world,), (rank,)
        ),
        "rng": mapping.ShardedObject("rng_state", [{"rank": rank, "state": [rank, 2, 3]}], (1, world), (0, rank)),
        **COMMON,
    }


def save(rank: int, world: int, path: str, store: str) -> None:
    """Save with Megatron; every rank calls it in a process of its own."""
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_, **__: None
    cuda.current_device = lambda: torch.device("cpu")
    vars(np)["product"] = np.prod  # gone from numpy 2
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy

    dc.save(describe(mapping, rank, world), path, ZarrSaveShardedStrategy("zarr", 1))
    dist.destroy_process_group()


def main() -> int:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("ranks", type=int)
    options = parser.parse_args()
    options.directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        context = multiprocessing.get_context("spawn")
        jobs = [
            context.Process(target=save, args=(rank, options.ranks, str(options.directory), f"{scratch}/store"))
            for rank in range(options.ranks)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    return max(abs(job.exitcode or 0) for job in jobs)


if __name__ == "__main__":
    sys.exit(main())

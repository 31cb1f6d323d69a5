"""What the tests of load share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.golden.write_zarr import COMMON, TENSORS, global_tensor

#: Golden checkpoints, and the number of ranks that wrote them.
WRITERS = {"zarr-mcore-0.7.0": 2, "zarr-mcore-0.7.0-one-rank": 1, "zarr-mcore-0.15.3": 2}


EXTRA, RNG = "decoder.layers.0._extra_state", "rng_state"


def shard_of(key: str, rank: int, world: int, axis: int) -> ShardedTensor:
    """A rank's part of an axis, as even as can be, in memory that holds other values."""
    full = global_tensor(key)
    low, high = list(pairwise(full.shape[axis] * n // world for n in range(world + 1)))[rank]
    data = torch.ones_like(full).narrow(axis, low, high - low)  # strided, for all axes but the first
    offset = tuple(low if n == axis else 0 for n in range(full.dim()))
    return ShardedTensor(key, data, full.dtype, tuple(data.shape), tuple(full.shape), offset, None)


def expected(shard: ShardedTensor) -> torch.Tensor:
    """The values of a shard."""
    full = global_tensor(shard.key)
    return full[tuple(slice(o, o + n) for o, n in zip(shard.global_offset, shard.local_shape, strict=True))]


def extra_objects(writers: int, mine: bool) -> dict[str, Any]:
    """The objects that writers hold."""
    replica = 0 if mine else 1
    return {
        "extra": [ShardedObject(EXTRA, None, (writers,), (n,), replica) for n in range(writers)],
        "rng": [ShardedObject(RNG, None, (1, writers), (0, n), replica) for n in range(writers)],
    }


def load(path: str, writers: int) -> None:
    """Load everything by every kind of description, and compare it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for axis in (0, -1):
        wanted = {key: shard_of(key, rank, world, axis % len(shape)) for key, (shape, _) in TENSORS.items()}
        loaded = dc.load({**wanted, **extra_objects(writers, rank == 0)}, path, strict="raise_all")
        for key, shard in wanted.items():
            assert loaded[key] is shard.data
            assert torch.equal(loaded[key], expected(shard)), (axis, key)
        for n, extra in enumerate(loaded["extra"]):
            assert extra["rank"] == n
            assert torch.equal(extra["amax"], torch.arange(3.0) + n)
        assert loaded["rng"] == [[{"rank": n, "state": [n, 2, 3]}] for n in range(writers)]
        assert {key: loaded[key] for key in COMMON} == COMMON
    # as Megatron's distributed optimizer asks: a flattened range; and layers by a prepended axis
    average = "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"
    qkv = "decoder.layers.self_attention.linear_qkv.weight"
    part = slice(48 * rank // world + (rank > 0), 48 * (rank + 1) // world + (rank + 1 < world))
    flat = ShardedTensor.from_rank_offsets_flat(
        average, torch.ones(part.stop - part.start), (8, 6), flattened_range=part
    )
    layers = [
        ShardedTensor.from_rank_offsets(
            qkv, torch.ones(4 // world, 4, dtype=torch.bfloat16), (0, n, 2), (1, rank, world), prepend_axis_num=1
        )
        for n in range(2)
    ]
    loaded = dc.load({"flat": flat, "layers": layers}, path)
    assert torch.equal(loaded["flat"], global_tensor(average).flatten()[part])
    for n, layer in enumerate(loaded["layers"]):
        assert torch.equal(layer, global_tensor(qkv)[n].chunk(world)[rank])

"""The state of which the tests of this folder make parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt.local import TensorAwareStateDict
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from tests.states import gated_halves

if TYPE_CHECKING:
    from shardckpt.local.memory_shards import KeptShards

MODES = ("atomic", "fully_parallel")


def make_tensor(number: int, shape: tuple[int, ...] = (8, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor whose values say its number."""
    return (torch.arange(torch.Size(shape).numel()) + 100 * number).reshape(shape).to(dtype)


def make_state(rank: int, world: int, *, filled: bool = True, data: bool = True) -> dict[str, Any]:
    """Return tensors of all ranks, of pairs of ranks and of one, a factory, objects and common state."""
    tp, dp = rank % 2, rank // 2

    def shard(number: int, value: torch.Tensor, *cells: tuple[int, int, int], **kwargs: Any) -> ShardedTensor:
        value = value.clone() if filled else torch.full_like(value, -1)
        made = ShardedTensor.from_rank_offsets(f"w{number}", value, *cells, **kwargs)
        return made if data else made.without_data()

    half = make_tensor(5).chunk(2)[tp].contiguous() if filled else torch.full((4, 3), -1.0)
    return {
        "everywhere": [shard(n, make_tensor(n), replica_id=rank) for n in range(4)],
        "pairs": shard(4, make_tensor(4, dtype=torch.bfloat16).chunk(2)[tp], (0, tp, 2), replica_id=dp),
        "glu": ShardedTensorFactory("glu", half, lambda *args: gated_halves(tp, 2, *args), torch.cat, dp),
        "mine": shard(6, make_tensor(6).chunk(world)[rank], (0, rank, world)),
        "flat": _flat(rank, world, filled=filled, data=data),
        "object": ShardedObject("o", {"rank": rank} if filled else None, (world,), (rank,)),
        "local": LocalNonpersistentObject(f"rank {rank}"),
        "iteration": 7 if filled else 0,
        "nested": {"rank": rank, "empty": []},
    }


def _flat(rank: int, world: int, *, filled: bool, data: bool) -> ShardedTensor:
    """A slice of a flattened grid cell, as Megatron's distributed optimizer had it until 0.15."""
    tp, dp, dps = rank % 2, rank // 2, world // 2
    part = slice(12 * dp // dps, 12 * (dp + 1) // dps)
    values = make_tensor(7).chunk(2)[tp].reshape(-1)[part].clone()
    values = values if filled else torch.full_like(values, -1)
    made = ShardedTensor.from_rank_offsets_flat("flat", values, (4, 3), (0, tp, 2), flattened_range=part)
    return made if data else made.without_data()


def check_state(loaded: dict[str, Any], rank: int, world: int) -> None:
    """Check that every leaf is what the filled state has there."""
    expected = make_state(rank, world)
    assert set(loaded) == set(expected)
    for got, shard in zip(loaded["everywhere"], expected["everywhere"], strict=True):
        assert torch.equal(got, shard.data), shard.key
    for name in ("pairs", "glu", "mine", "flat"):
        assert loaded[name].dtype == expected[name].data.dtype
        assert torch.equal(loaded[name], expected[name].data), name
    assert loaded["object"] == {"rank": rank}
    assert loaded["local"] == f"rank {rank}"
    assert loaded["iteration"] == 7
    assert loaded["nested"] == {"rank": rank, "empty": []}


def make_part(algo: str, **kwargs: Any) -> tuple[TensorAwareStateDict, KeptShards | None]:
    """Return this rank's part of the filled state."""
    return TensorAwareStateDict.from_state_dict(make_state(dist.get_rank(), dist.get_world_size()), algo, **kwargs)

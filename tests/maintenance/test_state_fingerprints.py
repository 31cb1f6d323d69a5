"""Fingerprints of what jobs have: equal values, whatever the ranks, the sharding and the kind of state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardckpt
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.tables import in_proof

if TYPE_CHECKING:
    from tests.ranks import Ranks


def _values() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(50 * 130, dtype=torch.float32).view(50, 130).sqrt().bfloat16(),
        "head.bias": torch.arange(301.0),
        "step": torch.tensor(7),
    }


def _fingerprint_sharded(axis: int) -> dict[str, str]:
    """Of DTensors, cut along an axis; scalars and vectors may be replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for key, value in _values().items():
        placement = Shard(axis) if value.dim() > axis else Replicate()
        state[key] = distribute_tensor(value, mesh, [placement])
    assert all(isinstance(value, DTensor) for value in state.values())
    found = shardckpt.fingerprint(state)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    assert all(other == found for other in gathered)
    return found


@pytest.mark.parametrize("world", [2, *in_proof(1, 4)])
@pytest.mark.parametrize("axis", [0, 1])
def test_it_does_not_depend_on_ranks_or_sharding(ranks: Ranks, world: int, axis: int) -> None:
    """Rows or columns of 1, 2 and 4 ranks have the fingerprints of the plain tensors of one process, on every rank."""
    expected = shardckpt.fingerprint(_values())
    assert list(expected) == sorted(_values())
    assert ranks.run(world, _fingerprint_sharded, axis) == [expected] * world


def test_a_sharded_state_dict_and_a_module_have_the_same() -> None:
    """Described shards, flattened ones too, a state dict and a module: the same values, the same fingerprints."""
    module = torch.nn.Linear(300, 7)
    weight, bias = module.weight.detach(), module.bias.detach()
    flat = weight.reshape(-1)
    shards = {
        "weight": [
            ShardedTensor.from_rank_offsets_flat("weight", flat[low:high], (7, 300), flattened_range=slice(low, high))
            for low, high in ((0, 1000), (1000, 2100))
        ],
        "bias": ShardedTensor.from_rank_offsets("bias", bias),
        "rng": ShardedObject("rng", {"seed": 1}, (1,), (0,)),
        "step": 3,
    }
    assert shardckpt.fingerprint(shards) == shardckpt.fingerprint(module) == shardckpt.fingerprint(module.state_dict())


def test_it_shows_what_changed() -> None:
    """Of a model of which one element has changed, the fingerprint of that tensor differs, and no other."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    before = shardckpt.fingerprint(model)
    with torch.no_grad():
        model[1].bias[2] += 1e-6
    after = shardckpt.fingerprint(model)
    assert [key for key in before if before[key] != after[key]] == ["1.bias"]


def test_a_hole_is_an_error() -> None:
    """Shards that do not fill their tensor have no fingerprint: a sum over them would take the hole for zeros."""
    with pytest.raises(ShardingError, match=r"'w'.*\[2:4\]"):
        shardckpt.fingerprint({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))})

"""What an optimizer keeps beside the state of parameters is a DTensor again where it was one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import ShardingError
from tests.adapters.test_stored_state import Masters, Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


class Counted(Wrapper):
    """Keeps plain tensors of a parameter's shape, and of none, beside its DTensors."""

    def step(self, closure: Any = None) -> None:
        """Step inside."""
        super().step(closure)
        weight = self.param_groups[0]["params"][0]
        self.slow += [torch.full(weight.shape, 3.0), torch.arange(3.0), torch.tensor(2.0)]


def _start(make: Callable[[Any], torch.optim.Optimizer], *, sharded: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, make(model.parameters())


def _train(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _list_entries(optimizer: Any) -> list[Any]:
    """Return the tensors of no parameter, a DTensor with its placements and the rows of this rank."""
    entries = list(optimizer.masters.values()) if isinstance(optimizer, Masters) else optimizer.slow
    return [
        (each.placements, each.to_local().tolist()) if isinstance(each, DTensor) else each.tolist() for each in entries
    ]


def _resume(make: Callable[[Any], torch.optim.Optimizer], path: str) -> None:
    """Save a job, and load it into one that has taken no step; then both take one."""
    job = _start(make, sharded=True)
    _train(*job)
    dist_checkpointing.save(to_sharded_state_dict(*job), path)
    resumed = _start(make, sharded=True)
    load_into(dist_checkpointing.load(to_sharded_state_dict(*resumed), path), *resumed)
    assert _list_entries(resumed[1]) == _list_entries(job[1])
    for each in (job, resumed):
        _train(*each)
    assert _list_entries(resumed[1]) == _list_entries(job[1])


@pytest.mark.parametrize("make", [Masters, Counted])
def test_entries_are_sharded_as_they_were(tmp_path: Path, ranks: Ranks, make: Any) -> None:
    """A fresh optimizer under FSDP2 gets DTensors and plain tensors as they were, and the next step is the same."""
    ranks.run(2, _resume, make, str(tmp_path / "c"))


def _reshard(path: str) -> list[Any]:
    resumed = _start(Masters, sharded=True)
    load_into(dist_checkpointing.load(to_sharded_state_dict(*resumed), path), *resumed)
    found = [each.full_tensor() for each in resumed[1].masters.values()]
    assert all(each.placements != (Replicate(),) for each in resumed[1].masters.values())
    return [each.tolist() for each in found]


def test_entries_of_one_rank_are_sharded(tmp_path: Path, ranks: Ranks) -> None:
    """Copies of weights that one rank saved are sharded as the weights of the job that resumes."""
    job = _start(Masters, sharded=False)
    _train(*job)
    dist_checkpointing.save(to_sharded_state_dict(*job), tmp_path / "c")
    expected = [each.tolist() for each in job[1].masters.values()]
    assert ranks.run(2, _reshard, str(tmp_path / "c")) == [expected] * 2


def test_an_optimizer_without_groups_is_refused() -> None:
    """A class that never names its parameters is an error with what to do, at the save."""

    class Nameless(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            del self.param_groups

    model, optimizer = _start(Nameless, sharded=False)
    with pytest.raises(ShardingError, match="optimizer 0, a Nameless, has no param_groups"):
        to_sharded_state_dict(model, optimizer)

"""What an optimizer keeps beside the state of parameters is a DTensor again where it was one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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
    return [each.full_tensor().tolist() for each in resumed[1].masters.values()]


def _save(path: str) -> list[Any]:
    job = _start(Masters, sharded=True)
    _train(*job)
    dist_checkpointing.save(to_sharded_state_dict(*job), path)
    return [each.full_tensor().tolist() for each in job[1].masters.values()]


def test_entries_are_sharded_over_other_ranks(tmp_path: Path, ranks: Ranks) -> None:
    """What two ranks have saved is sharded over four, as the parameters are."""
    expected = ranks.run(2, _save, str(tmp_path / "c"))[0]
    assert ranks.run(4, _reshard, str(tmp_path / "c")) == [expected] * 4


class Own(torch.optim.AdamW):
    """Has tensors of its own that are whole on each rank, of the shapes of weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own: dict[str, Any] = {}

    def step(self, closure: Any = None) -> Any:
        """Step, and make them."""
        super().step(closure)
        self.fill()

    def fill(self) -> None:
        """Make them."""
        self.own = {"mask": torch.arange(20.0).view(5, 4), "d": torch.tensor([7.0])}

    def state_dict(self) -> Any:
        """Both."""
        return {**super().state_dict(), "own": self.own}

    def load_state_dict(self, state_dict: Any) -> None:
        """Both."""
        self.own = state_dict.get("own", {})
        super().load_state_dict(state_dict)


def _keep_whole(path: str) -> None:
    job, resumed = _start(Own, sharded=True), _start(Own, sharded=True)
    _train(*job)
    if dist.get_rank():  # another rank of a job was replaced, and has no entries yet
        resumed[1].fill()
    dist_checkpointing.save(to_sharded_state_dict(*job), path)
    load_into(dist_checkpointing.load(to_sharded_state_dict(*resumed), path), *resumed)
    for name, tensor in job[1].own.items():
        assert type(resumed[1].own[name]) is torch.Tensor
        assert resumed[1].own[name].equal(tensor)


def test_entries_that_were_whole_stay_whole(tmp_path: Path, ranks: Ranks) -> None:
    """A tensor that each rank had whole is so again, whatever its shape, also where only some ranks have it."""
    ranks.run(2, _keep_whole, str(tmp_path / "c"))


def test_an_optimizer_without_groups_is_refused() -> None:
    """A class that never names its parameters is an error with what to do, at the save."""

    class Nameless(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            del self.param_groups

    model, optimizer = _start(Nameless, sharded=False)
    with pytest.raises(ShardingError, match="optimizer 0, a Nameless, has no param_groups"):
        to_sharded_state_dict(model, optimizer)


class Scales(torch.optim.Optimizer):
    """Keeps a scale for each two rows of a weight, sharded by themselves, and a table that all ranks have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make what is not there, of numbers that differ from place to place."""
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                scales, table = torch.arange(8.0), torch.arange(6.0).view(2, 3)
                state["scales"] = distribute_tensor(scales, param.device_mesh, [Shard(0)], src_data_rank=None)
                state["columns"] = distribute_tensor(table, param.device_mesh, [Shard(1)], src_data_rank=None)
                state["table"] = distribute_tensor(table, param.device_mesh, [Replicate()], src_data_rank=None)
                whole = torch.arange(param.numel() * 1.0).view(param.shape)
                state["whole"] = distribute_tensor(whole, param.device_mesh, [Replicate()], src_data_rank=None)
                one = torch.tensor([3.0])
                state["one"] = distribute_tensor(one, param.device_mesh, [Replicate()], src_data_rank=None)
                state["exp_avg"] = torch.zeros_like(param) + 2.0


def _list_scales(path: str, act: str) -> list[Any]:
    """Return the state of the first weight after a save or a load: placements, rows of this rank, and all of it."""
    model, optimizer = _start(Scales, sharded=True)
    if act == "save":
        optimizer.step()
        dist_checkpointing.save(to_sharded_state_dict(model, optimizer), path)
    else:
        load_into(dist_checkpointing.load(to_sharded_state_dict(model, optimizer), path), model, optimizer)
    state = optimizer.state[model[0].weight]
    placed = {name: each.placements for name, each in state.items()}
    return [
        placed,
        {name: each.full_tensor().tolist() for name, each in state.items()},
        state["scales"].to_local().numel(),
    ]


def test_state_with_a_layout_of_its_own_is_laid_out_as_it_was(tmp_path: Path, ranks: Ranks) -> None:
    """Scales of blocks are this rank's again, and what was whole is: with another number of ranks, too."""
    path = str(tmp_path / "c")
    saved = ranks.run(2, _list_scales, path, "save")[0]
    for world in (2, 4):
        loaded = ranks.run(world, _list_scales, path, "load")
        assert [each[:2] for each in loaded] == [saved[:2]] * world
        assert [each[2] for each in loaded] == [8 // world] * world

"""What a caller changes in the description of a model and its optimizer, before a save or a load, is heeded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.mapping import LocalNonpersistentObject, OptionalEntries, ShardedBase
from shardckpt.state_dict import nested_values

if TYPE_CHECKING:
    from pathlib import Path


def _job(*batches: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in batches:
        optimizer.zero_grad()
        model(torch.full((1, 4), number + 1.0)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def _momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [optimizer.state.get(param, {}).get("momentum_buffer") for param in model.parameters()]


def _rename(described: Any, old: str, new: str) -> Any:
    for shard in nested_values(described):
        if isinstance(shard, ShardedBase):
            shard.key = f"{new}{shard.key}" if not old else shard.key.replace(old, new)
    return described


@pytest.mark.parametrize(("old", "new"), [("", "job."), ("momentum_buffer", "mom")])
def test_keys_may_be_others(tmp_path: Path, old: str, new: str) -> None:
    """A prefix before all keys, or another name of a slot, at the save and at the load."""
    saved, loaded = _job(0, 1), _job(2)
    dist_checkpointing.save(_rename(to_sharded_state_dict(*saved), old, new), tmp_path / "c")
    wanted = _rename(to_sharded_state_dict(*loaded), old, new)
    load_into(dist_checkpointing.load(wanted, tmp_path / "c"), *loaded)
    assert all(map(torch.equal, _momenta(*loaded), _momenta(*saved)))


def test_a_slot_may_be_left_out_or_put_elsewhere(tmp_path: Path) -> None:
    """Of the live state: one that is deleted, one that is local, one with other memory, one without memory."""
    saved, loaded = _job(0, 1), _job(2)
    dist_checkpointing.save(to_sharded_state_dict(*saved), tmp_path / "c")
    before = [each.clone() for each in _momenta(*loaded)]
    wanted = to_sharded_state_dict(*loaded)
    state, buffer = wanted["optimizer"]["state"], torch.zeros(4, 4)
    del state["0.weight"]["momentum_buffer"]
    state["0.bias"] = LocalNonpersistentObject({"mine": 1})
    state["1.weight"]["momentum_buffer"].data = buffer
    state["1.bias"]["momentum_buffer"].data = None
    found = dist_checkpointing.load(wanted, tmp_path / "c")["optimizer"]["state"]
    assert "momentum_buffer" not in found.get("0.weight", {})
    assert found["0.bias"] == {"mine": 1}
    assert found["1.weight"]["momentum_buffer"] is buffer
    assert torch.equal(buffer, _momenta(*saved)[2])
    assert torch.equal(found["1.bias"]["momentum_buffer"], _momenta(*saved)[3])
    assert all(map(torch.equal, _momenta(*loaded), before))


def test_state_may_be_left_out(tmp_path: Path) -> None:
    """Of a parameter, or all of it: the options are loaded, and the optimizer makes its state in its time."""
    saved, loaded = _job(0, 1), _job()
    saved[1].param_groups[0]["lr"] = 0.7
    dist_checkpointing.save(to_sharded_state_dict(*saved), tmp_path / "c")
    wanted = to_sharded_state_dict(*loaded)
    assert isinstance(wanted["optimizer"]["state"], OptionalEntries)
    del wanted["optimizer"]["state"]
    load_into(dist_checkpointing.load(wanted, tmp_path / "c", on_unused="ignore"), *loaded)
    assert loaded[1].param_groups[0]["lr"] == 0.7
    assert _momenta(*loaded) == [None] * 4

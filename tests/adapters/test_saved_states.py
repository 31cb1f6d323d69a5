"""Optimizer state that is described in each save is described as it is then, however little is looked at again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import SavedModules, load_into, to_sharded_state_dict
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensorFactory
from shardckpt.state_dict import nested_values
from tests.adapters.models import made_model, sharded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


def _list_fields(described: Any) -> dict[str, Any]:
    """The fields and the memory of each shard, by its key."""
    found: dict[str, Any] = {}
    for leaf in nested_values(described):
        shards = leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf
        for shard in nested_values(shards):
            if hasattr(shard, "list_fields"):
                place = (shard.data.data_ptr(), shard.data.stride(), shard.data.dtype, shard.data.requires_grad)
                found[shard.key] = (shard.list_fields(), place)
            else:
                found[shard.key] = (type(shard), shard.data, getattr(shard, "keys", ()))
    return found


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _change_each(model: nn.Module) -> None:
    """Raise unless each change is seen, and nothing is described again where tensors are alike."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    _train(model, optimizer)
    saved = SavedModules()
    first: Any = optimizer.param_groups[0]["params"][0]
    state = optimizer.state
    is_sharded = isinstance(first, DTensor)  # a new DTensor has a new mesh and placements

    #: Each change, and whether the tensors are then like those before.
    changes: dict[str, tuple[Callable[[], Any], bool]] = {
        "values": (lambda: _train(model, optimizer), True),
        "other memory": (lambda: state[first].update(exp_avg=state[first]["exp_avg"].clone()), not is_sharded),
        "options": (lambda: optimizer.param_groups[0].update(lr=0.5), True),
        "dtype": (lambda: state[first].update(exp_avg=state[first]["exp_avg"].half()), False),
        "shape": (lambda: state[first].update(step=torch.ones(1)), False),
        "order of values": (lambda: state[first].update(step=state[first].pop("step")), False),
        "one more": (lambda: state[first].update(max_exp_avg=state[first]["exp_avg"].clone()), False),
        "a number": (lambda: state[first].update(count=3), False),
        "another number": (lambda: state[first].update(count=4), False),
        "a tensor again": (lambda: state[first].update(count=torch.tensor(4)), False),
        "a list": (lambda: state[first].update(count=[torch.tensor(4), 1]), False),
        "a dict": (lambda: state[first].update(count={"a": torch.tensor(4)}), False),
        "a dict of another": (lambda: state[first].update(count={"b": torch.tensor(4)}), False),
        "one less": (lambda: state[first].pop("count"), False),
        "none of one": (lambda: state.pop(first), False),
        "none": (state.clear, False),
    }
    mixed = {"a number", "another number", "a list", "a dict", "a dict of another"}
    for name, (change, is_like) in {"first": (lambda: None, False), **changes}.items():
        change()
        for again in (False, True):
            before = list(saved._states._tensors._shards.values())  # kept: a new shard could lie where one was
            found: Any = saved.describe(model, optimizer)
            shards = list(nested_values(found["optimizer"]["state"]))
            assert _list_fields(found) == _list_fields(to_sharded_state_dict(model, optimizer)), name
            if is_like or (again and name not in mixed):
                assert all(any(shard is kept for kept in before) for shard in shards), name
            saved.release()


def test_any_change_of_optimizer_state_is_seen() -> None:
    """After any change of its state an optimizer is described as in a first save, and else not described again."""
    _change_each(made_model(1))


def _change_sharded() -> None:
    _change_each(sharded(made_model(1)))


def test_any_change_of_sharded_state_is_seen(ranks: Ranks) -> None:
    """The same under FSDP2, where state is DTensors but for the step."""
    ranks.run(2, _change_sharded)


def test_values_of_one_key_are_refused(tmp_path: Path) -> None:
    """State whose keys are those of another parameter's state is refused by each save, as by a first one."""
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(2))
    inner = nn.Module()
    inner.b = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([model.a, inner.b])
    model.register_parameter("c", None)
    model._modules["a"] = inner  # its parameter is "a.b"
    optimizer.state[model.a] = {"b": {"m": torch.zeros(2)}}
    optimizer.state[inner.b] = {"m": torch.ones(2)}
    saved = SavedModules()
    for number in range(2):
        with pytest.raises(CheckpointingException, match=r"optimizer\.state\.a\.b\.m"):
            dist_checkpointing.save(saved.describe(model, optimizer), tmp_path / str(number))
        saved.release()
    with pytest.raises(CheckpointingException, match=r"optimizer\.state\.a\.b\.m"):
        dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "unkept")


def test_state_that_is_described_once_comes_back(tmp_path: Path) -> None:
    """A load takes what a later save of kept descriptions has stored, nested values and numbers too."""
    model, fresh = made_model(1), made_model(2)
    optimizer, other = (torch.optim.Adam(each.parameters()) for each in (model, fresh))
    _train(model, optimizer)
    first = next(model.parameters())
    optimizer.state[first].update(inside={"a": torch.ones(2), "n": 3}, count=4)
    saved = SavedModules()
    for number in range(2):
        optimizer.state[first]["count"] = number
        dist_checkpointing.save(saved.describe(model, optimizer), tmp_path / str(number))
        saved.release()
    load_into(dist_checkpointing.load(to_sharded_state_dict(fresh, other), tmp_path / "1"), fresh, other)
    found = other.state[next(fresh.parameters())]
    assert (found["count"], found["inside"]["n"]) == (1, 3)
    assert found["inside"]["a"].equal(torch.ones(2))
    for here, there in zip(model.parameters(), fresh.parameters(), strict=True):
        assert optimizer.state[here]["exp_avg"].equal(other.state[there]["exp_avg"])

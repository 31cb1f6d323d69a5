"""What describing costs, counted: by calls for so many parameters and optimizers, never by seconds."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shardckpt import dist_checkpointing
from shardckpt.adapters import SavedModules, dtensor, load_into, module_tree, to_sharded_state_dict
from tests.adapters.models import made_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


class _Job:
    """A model with one optimizer for each of so many parts of its parameters, and the walks through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, optimizers: int) -> None:
        self.model = made_model(1)
        params = list(self.model.parameters())
        self.optimizers = [torch.optim.Adam(params[number::optimizers]) for number in range(optimizers)]
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        for optimizer in self.optimizers:
            optimizer.step()
        self.walks = 0
        walk = module_tree._Tree._walk

        def count(tree: Any, root: Any) -> None:
            self.walks += 1
            walk(tree, root)

        monkeypatch.setattr(module_tree._Tree, "_walk", count)


@pytest.mark.parametrize("kept", [False, True])
def test_modules_are_walked_once_a_save(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """To describe a model and its optimizers for a save takes one walk through its modules, however many these are."""
    saved = SavedModules()
    for count in (1, 4):
        job = _Job(monkeypatch, count)
        (saved.describe if kept else to_sharded_state_dict)(job.model, *job.optimizers)
        assert job.walks == 1


def _count_layouts(_: str) -> int:
    mesh = init_device_mesh("cpu", (1,))
    state = {f"{number}": distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for number in range(5)}
    with mock.patch.object(dtensor, "_find_common", wraps=dtensor._find_common) as find:
        to_sharded_state_dict(state)
    return find.call_count


def test_equal_layouts_of_a_state_dict_are_computed_once(ranks: Ranks, tmp_path: Path) -> None:
    """The DTensors of a state dict that are cut alike share the layout, which takes most of the time."""
    assert ranks.run(1, _count_layouts, str(tmp_path)) == [1]


def test_a_load_walks_as_often_for_many_optimizers_as_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules are walked once for the names and tensors of all, and once to hand over, however many optimizers."""
    for count in (1, 4):
        job = _Job(monkeypatch, count)
        state = to_sharded_state_dict(job.model, *job.optimizers)
        dist_checkpointing.save(state, tmp_path / str(count))
        job.walks = 0
        load_into(dist_checkpointing.load(state, tmp_path / str(count)), job.model, *job.optimizers)
        assert job.walks == 2


@pytest.mark.parametrize("count", [1, 40])
def test_keys_of_options_are_made_once(count: int) -> None:
    """Later saves list options of few groups or many under the very keys of the first one, new ones under new keys."""
    model = nn.ParameterDict({f"w{number}": nn.Parameter(torch.ones(1)) for number in range(count)})
    optimizers, saved = [torch.optim.SGD([param]) for param in model.values()], SavedModules()

    def list_keys(lr: float) -> dict[str, Any]:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
        described: Any = saved.describe(model, *optimizers)
        return {name: each.keys for name, each in described["optimizer"]["for_dcp"].items()}

    first, again = list_keys(0.5), list_keys(0.25)
    assert again.keys() == first.keys()
    assert all(again[name] is keys for name, keys in first.items())
    optimizers[0].param_groups[0]["mine"] = 1
    assert len(list_keys(0.25)) == len(first) + 1


def test_equal_options_of_many_groups_are_stored_once(tmp_path: Path) -> None:
    """Groups whose options are plain, equal and of one type share a dict in the checkpoint; lists stay with a group."""
    model = nn.ParameterDict({f"w{number}": nn.Parameter(torch.ones(1)) for number in range(40)})
    optimizers = [torch.optim.SGD([param], lr=0.5) for param in model.values()]
    optimizers[7].param_groups[0]["nesterov"] = 0  # equal to False, of another type
    for optimizer in optimizers[30:]:
        optimizer.param_groups[0]["mine"] = [1]
    state = to_sharded_state_dict(model, *optimizers)
    dist_checkpointing.save(state, tmp_path / "a")
    loaded = dist_checkpointing.load(state, tmp_path / "a")
    (stored,) = loaded["optimizer"]["param_groups"].values()
    assert len({id(group["options"]) for group in stored["values"]}) == 1 + 1 + 10
    fresh = [torch.optim.SGD([param]) for param in model.values()]
    load_into(loaded, model, *fresh)
    options = [optimizer.param_groups[0] for optimizer in fresh]
    assert [type(each["nesterov"]) for each in options[6:9]] == [bool, int, bool]
    assert len({id(each["mine"]) for each in options[30:]}) == 10


def test_the_collector_waits_while_a_model_is_described_or_restored(tmp_path: Path) -> None:
    """Python's garbage collector is paused while the descriptions of all tensors are made, which all stay."""
    enabled: list[bool] = []

    class Watched(torch.optim.SGD):
        def state_dict(self) -> Any:
            enabled.append(gc.isenabled())
            return super().state_dict()

    model = nn.Linear(1, 1)
    optimizer = Watched(model.parameters())
    state = to_sharded_state_dict(model, optimizer)
    SavedModules().describe(model, optimizer)
    dist_checkpointing.save(state, tmp_path / "a")
    load_into(dist_checkpointing.load(state, tmp_path / "a"), model, optimizer)
    assert enabled == [False] * 3
    assert gc.isenabled()


def test_options_of_many_groups_are_one_object(tmp_path: Path) -> None:
    """An option of many groups is one object a value for stock DCP, which finds it under each group."""
    model = nn.ParameterDict({f"w{number}": nn.Parameter(torch.ones(1)) for number in range(40)})
    params = list(model.values())
    optimizers = [torch.optim.SGD([param], lr=0.5, momentum=0.9) for param in params]
    optimizers[7].param_groups[0]["lr"] = 0.25
    optimizers[8].param_groups[0]["nesterov"] = 0  # equal to False, of another type
    state = to_sharded_state_dict(model, *optimizers)
    options = optimizers[0].param_groups[0].keys() - {"params"}
    assert len(state["optimizer"]["for_dcp"]) == len(params) + len(options) + 2
    dist_checkpointing.save(state, tmp_path / "a")
    wanted: dict[str, Any] = {
        f"optimizer.param_groups.{name}.{option}": None for name in range(40) for option in ("lr", "nesterov", "params")
    }
    dcp.load(wanted, checkpoint_id=tmp_path / "a")
    found = {key.removeprefix("optimizer.param_groups."): value for key, value in wanted.items()}
    assert [found[f"{number}.lr"] for number in range(40)] == [0.5] * 7 + [0.25] + [0.5] * 32
    assert [type(found[f"{number}.nesterov"]) for number in (7, 8, 9)] == [bool, int, bool]
    assert found["39.params"] == [list(model)[39]]

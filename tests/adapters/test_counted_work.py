"""What describing costs, counted: by calls for so many parameters and optimizers, never by seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardckpt import dist_checkpointing
from shardckpt.adapters import SavedModules, load_into, module_tree, to_sharded_state_dict
from tests.adapters.models import made_model

if TYPE_CHECKING:
    from pathlib import Path


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


def test_a_load_walks_as_often_for_many_optimizers_as_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names are looked for once a load, and not for each optimizer."""
    walks = set()
    for count in (1, 4):
        job = _Job(monkeypatch, count)
        state = to_sharded_state_dict(job.model, *job.optimizers)
        dist_checkpointing.save(state, tmp_path / str(count))
        job.walks = 0
        load_into(dist_checkpointing.load(state, tmp_path / str(count)), job.model, *job.optimizers)
        walks.add(job.walks)
    assert len(walks) == 1


def test_keys_of_options_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later saves list options under the very keys of the first one, and under new ones where a group has changed."""
    job, saved = _Job(monkeypatch, 1), SavedModules()

    def list_keys() -> dict[str, Any]:
        described: Any = saved.describe(job.model, *job.optimizers)
        return {name: each.keys for name, each in described["optimizer"]["for_dcp"].items()}

    first = list_keys()
    job.optimizers[0].param_groups[0]["lr"] = 0.5
    again = list_keys()
    assert again.keys() == first.keys()
    assert all(again[name] is keys for name, keys in first.items())
    job.optimizers[0].param_groups[0]["mine"] = 1
    assert len(list_keys()) == len(first) + 1


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

"""Optimizers that have another inside, and state or groups of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.manager import CheckpointConfig, CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path


class Partitioning(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer: its groups are not its inner optimizer's, which get their options with a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        self.optim = torch.optim.SGD(self.param_groups[0]["params"], lr=0.5, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the inner one."""
        self.optim.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.optim.step()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state."""

    def state_dict(self) -> dict[str, Any]:
        """Refuse: nobody has gathered it."""
        raise RuntimeError("not consolidated")


class Averaging(torch.optim.Optimizer):
    """As PostLocalSGDOptimizer: it counts steps, and its state dict has the count besides its inner optimizer's."""

    def __init__(self, params: Any) -> None:
        self.optim = torch.optim.SGD(params, lr=0.5, momentum=0.9)
        self.param_groups = self.optim.param_groups
        self.count = 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner one's."""
        return self.optim.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the inner one, and count."""
        self.optim.step()
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the inner one's, and the count."""
        return {**self.optim.state_dict(), "step": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both."""
        self.optim.load_state_dict(state_dict)
        self.count = state_dict["step"]


def _job(kind: Any) -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return {"model": model, "optimizer": kind(model.parameters())}


def _step(states: dict[str, Any]) -> None:
    states["model"](torch.ones(1, 2)).sum().backward()
    states["optimizer"].step()
    states["model"].zero_grad()


def test_groups_besides_the_inner_optimizers_have_the_saved_options(tmp_path: Path) -> None:
    """A rate that was set after the last step is saved, and the next step of a resumed job takes it."""
    saved, live = _job(Partitioning), _job(Partitioning)
    _step(saved)
    saved["optimizer"].param_groups[0]["lr"] = 0.125
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), saved) as manager:
        manager.save(1)
    with CheckpointManager(CheckpointConfig(folder=tmp_path), live) as manager:
        assert manager.load()
    assert live["optimizer"].param_groups[0]["lr"] == 0.125
    for states in (saved, live):
        _step(states)
    assert live["model"].weight.equal(saved["model"].weight)


def test_state_that_a_wrapper_adds_comes_back(tmp_path: Path) -> None:
    """What a wrapper's state dict has besides that of the optimizer inside is saved and loaded."""
    saved, live = _job(Averaging), _job(Averaging)
    for _ in range(3):
        _step(saved)
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), saved) as manager:
        manager.save(3)
    with CheckpointManager(CheckpointConfig(folder=tmp_path), live) as manager:
        assert manager.load()
    assert live["optimizer"].count == 3
    for states in (saved, live):
        _step(states)
    assert live["model"].weight.equal(saved["model"].weight)


def test_a_state_dict_in_parts_is_refused_by_name() -> None:
    """Where the adapters meet an optimizer that must gather its state, the error names it and what saves it."""
    states = _job(Partitioning)
    with pytest.raises(ShardingError, match=r"optimizer 0, a Partitioning, .*give it to a CheckpointManager"):
        to_sharded_state_dict(states["model"], states["optimizer"])


class Around(Averaging):
    """A wrapper round a partitioning optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.optim = Partitioning(self.optim.param_groups[0]["params"])
        self.param_groups = self.optim.param_groups


def test_a_wrapper_round_a_partitioning_optimizer_is_saved_by_its_inner_one(tmp_path: Path) -> None:
    """Its state dict cannot be asked for; the rate of the partitioning one inside comes back."""
    saved, live = _job(Around), _job(Around)
    _step(saved)
    saved["optimizer"].optim.param_groups[0]["lr"] = 0.125
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), saved) as manager:
        manager.save(1)
    with CheckpointManager(CheckpointConfig(folder=tmp_path), live) as manager:
        assert manager.load()
    assert live["optimizer"].optim.param_groups[0]["lr"] == 0.125


class Stateless(Averaging):
    """A wrapper that has no state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Refuse, as an abstract method."""
        raise NotImplementedError


class Broken(Averaging):
    """A wrapper whose state dict cannot be made."""

    def state_dict(self) -> dict[str, Any]:
        """Fail."""
        raise ValueError("no count")


def test_a_wrapper_without_a_state_dict_is_saved_by_its_inner_optimizer(tmp_path: Path) -> None:
    """Where state_dict is not implemented, the state is the inner one's; any other error of it is not hidden."""
    saved, live = _job(Stateless), _job(Stateless)
    _step(saved)
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), saved) as manager:
        manager.save(1)
    with CheckpointManager(CheckpointConfig(folder=tmp_path), live) as manager:
        assert manager.load()
    for states in (saved, live):
        _step(states)
    assert live["model"].weight.equal(saved["model"].weight)
    with pytest.raises(CheckpointingException, match="ValueError: no count"):
        CheckpointManager(CheckpointConfig(folder=tmp_path), _job(Broken))


def test_a_group_without_parameters_on_a_rank_has_the_loaded_options(tmp_path: Path) -> None:
    """Of two groups one has its parameters on another rank: its rate is loaded here, too, for schedulers to go on."""

    def job(lr: float) -> dict[str, Any]:
        states = _job(Partitioning)
        states["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr})
        states["optimizer"].optim.add_param_group({"params": [], "lr": 9.0})
        return states

    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), job(0.125)) as manager:
        manager.save(1)
    live = job(0.5)
    with CheckpointManager(CheckpointConfig(folder=tmp_path), live) as manager:
        assert manager.load()
    assert live["optimizer"].param_groups[1]["lr"] == 0.125


def test_groups_that_do_not_fit_are_an_error_of_the_state(tmp_path: Path) -> None:
    """A partitioning optimizer whose inner one has fewer groups is named, before anything is saved."""
    states = _job(Partitioning)
    states["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with (
        CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), states) as manager,
        pytest.raises(CheckpointingException, match="have 2 and 1 parameter groups: add groups to the outer one alone"),
    ):
        manager.save(1)

"""Modules that decide what their state dict has: keys of hooks, of ``_save_to_state_dict``, extra state, and none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import ShapeMismatchError
from tests.adapters.own_keys import Scaled
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Fused(nn.Module):
    """Stores three tensors in the place of one, by hooks."""

    def __init__(self, seed: float) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.arange(12.0).view(6, 2) * seed)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.update(zip([f"{prefix}{n}" for n in "qkv"], state.pop(f"{prefix}qkv").clone().chunk(3), strict=True))

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}qkv"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])


class Counting(nn.Linear):
    """Has extra state: a number and a tensor."""

    def __init__(self, seed: float) -> None:
        super().__init__(1, 1)
        self.calls = int(seed)
        nn.init.constant_(self.weight, seed)
        nn.init.constant_(self.bias, seed)

    def get_extra_state(self) -> Any:
        """Return the number, and a tensor of it."""
        return {"calls": self.calls, "mean": torch.full((2,), float(self.calls))}

    def set_extra_state(self, state: Any) -> None:
        """Take the number."""
        self.calls = state["calls"]


MODELS: dict[str, tuple[Callable[[float], nn.Module], set[str]]] = {
    "own key": (lambda seed: nn.Sequential(Scaled(seed)), {"0.weight", "0.bias", "0.weight.absmax"}),
    "hooks": (lambda seed: nn.Sequential(Fused(seed), nn.Identity()), {"0.q", "0.k", "0.v"}),
    "extra state": (lambda seed: nn.Sequential(Counting(seed)), {"0.weight", "0.bias"}),
    "wrapped": (
        lambda seed: checkpoint_wrapper(nn.Sequential(Scaled(seed), checkpoint_wrapper(Fused(seed)))),
        {"0.weight", "0.bias", "0.weight.absmax", "1.q", "1.k", "1.v"},
    ),
    "nothing": (lambda seed: nn.Identity(), set()),
}


def _state(model: nn.Module) -> str:
    return repr(model.state_dict())


@table("kind", list(MODELS))
def test_what_the_module_stores_is_what_it_gets(tmp_path: Path, kind: str) -> None:
    """What hooks and classes put into a state dict is saved, by names without wrappers, and handed back to them."""
    make, names = MODELS[kind]
    model, resumed = make(3.0), make(5.0)
    assert kind == "nothing" or _state(model) != _state(resumed)
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "saved")
    with dist_checkpointing.open_checkpoint(tmp_path / "saved") as checkpoint:
        assert set(checkpoint) == names  # of tensors
    load_into(dist_checkpointing.load(to_sharded_state_dict(resumed), tmp_path / "saved"), resumed)
    assert _state(resumed) == _state(model)


def test_a_stage_without_parameters_is_one(tmp_path: Path) -> None:
    """A pipeline stage that has nothing to store is saved and loaded beside one that has."""
    stages = [nn.ModuleDict({"first": nn.Linear(2, 2)}), nn.Identity()]
    resumed = [nn.ModuleDict({"first": nn.Linear(2, 2)}), nn.Identity()]
    optimizer, other = (torch.optim.AdamW(each[0].parameters()) for each in (stages, resumed))
    stages[0]["first"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dist_checkpointing.save(to_sharded_state_dict(stages, optimizer), tmp_path / "saved")
    loaded = dist_checkpointing.load(to_sharded_state_dict(resumed, other), tmp_path / "saved")
    load_into(loaded, resumed, other)
    assert _state(resumed[0]) == _state(stages[0])
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


class Upgrading(nn.Linear):
    """Looks at what it is given, and stores what any Linear does."""

    seen: tuple[str, ...] = ()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = tuple(state_dict)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_whoever_looks_at_a_load_sees_it(tmp_path: Path) -> None:
    """Classes and hooks that change nothing in a save are called in a load, as load_state_dict calls them."""
    calls: list[str] = []

    def make(*, observed: bool) -> nn.Module:
        model = nn.Sequential(Upgrading(2, 2), nn.Linear(2, 2))
        if observed:
            model[1].register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
            model[1].register_load_state_dict_post_hook(lambda *_: calls.append("after"))
        return model

    model, resumed = make(observed=False), make(observed=True)
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "saved")
    load_into(dist_checkpointing.load(to_sharded_state_dict(resumed), tmp_path / "saved"), resumed)
    assert resumed[0].seen == ("0.weight", "0.bias")  # type: ignore[union-attr,index]
    assert calls == ["before", "after"]
    assert _state(resumed) == _state(model)


def test_values_that_are_not_in_place_are_copied() -> None:
    """Values of other memory, dtype or a wrapped module are copied; another shape is load_state_dict's error."""
    values = {"0.weight": torch.ones(2, 2, dtype=torch.float64), "0.bias": torch.ones(2), "1.weight": torch.ones(2, 2)}
    model = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2, bias=False)))
    load_into(values, model)
    assert all(parameter.eq(1).all() and parameter.dtype == torch.float32 for parameter in model.parameters())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        load_into({**values, "0.bias": torch.ones(1)}, model)


class Overriding(nn.Module):
    """Only passes on what it is given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(size))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Pass it on."""
        return super().load_state_dict(*args, **kwargs)


def test_a_buffer_of_another_size_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """A module that overrides load_state_dict alone has its buffers checked as any other."""
    saved, live = Overriding(3), Overriding(5)
    before = live.inner.weight.detach().clone()
    dist_checkpointing.save(to_sharded_state_dict(saved), tmp_path / "c")
    with pytest.raises(ShapeMismatchError, match="'table'"):
        dist_checkpointing.load(to_sharded_state_dict(live), tmp_path / "c")
    assert torch.equal(live.inner.weight, before)

"""Modules and optimizers as state dicts by full names, and back: by torch's own state-dict API."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from shardckpt.errors import ShardingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer


def parts_of(model: Any) -> list[Module]:
    """The modules that a caller gives: one, or a list of the stages that this rank has.

    Raises:
        ShardingError: it is something else.
    """
    parts = list(model) if isinstance(model, (list, tuple)) else [model]
    for part in parts:
        if not isinstance(part, torch.nn.Module):
            raise ShardingError(f"expected a state dict, a module or a list of modules, got a {type(part).__name__}")
    return parts


def model_state(parts: Sequence[Module]) -> dict[str, Any]:
    """The state of all parts by full name, wrappers' prefixes taken out.

    Raises:
        ShardingError: two parts have different things under one name.
    """
    merged = _Merged("model part")
    for number, part in enumerate(parts):
        merged.add(number, get_model_state_dict(part))
    return merged.values


def optimizer_state(parts: Sequence[Module], optimizers: Sequence[Optimizer]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and group options of every parameter by full name: ``({name: state}, {name: options})``.

    An optimizer that has made no step gives the state with which it begins (zeros, by torch's API); it keeps none.

    Raises:
        ShardingError: two optimizers have the same parameter, or one has those of several parts.
    """
    states, options = _Merged("optimizer"), _Merged("optimizer")
    for number, optimizer in enumerate(optimizers):
        with _initial_state(optimizer) as is_fresh:
            found: Any = get_optimizer_state_dict(owner(parts, optimizer, number), optimizer)
        if is_fresh:
            _forget_the_step(found["state"])
        states.add(number, found["state"])
        for group in found["param_groups"]:
            given = {name: value for name, value in group.items() if name != "params"}
            options.add(number, dict.fromkeys(group["params"], given))
    return states.values, options.values


def owner(parts: Sequence[Module], optimizer: Optimizer, number: int) -> Module:
    """The part that has all parameters of an optimizer.

    Raises:
        ShardingError: there is none.
    """
    wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
    owned = [wanted & {id(param) for param in part.parameters()} for part in parts]
    for part, mine in zip(parts, owned, strict=True):
        if mine == wanted:
            return part
    holders = [str(index) for index, mine in enumerate(owned) if mine]
    where = f"spread over parts {', '.join(holders)}" if len(holders) > 1 else "not all in the model"
    raise ShardingError(
        f"the parameters of optimizer {number} are {where}: make an optimizer of each part's own parameters, after the "
        "model was wrapped, and pass all of them"
    )


class _Merged:
    """Values by name, of several givers, each of which must give names of its own.

    Args:
        giver: What gives them, for errors.
    """

    def __init__(self, giver: str) -> None:
        self.values: dict[str, Any] = {}
        self._giver = giver
        self._givers: dict[str, int] = {}

    def add(self, giver: int, values: dict[str, Any]) -> None:
        """Add what the giver of this number gives."""
        for name, value in values.items():
            if name in self.values and not _is_same(self.values[name], value):
                raise ShardingError(
                    f"{name!r} is in {self._giver} {self._givers[name]} and in {self._giver} {giver}, and is not the "
                    "same: names must be those in the whole model (give each part its own prefix or layer numbers)"
                )
            self.values[name] = value
            self._givers.setdefault(name, giver)


def _is_same(one: Any, other: Any) -> bool:
    """Whether both are one thing, as shared parameters are."""
    if not isinstance(one, torch.Tensor) or type(one) is not type(other):
        return one is other
    with torch.no_grad():
        here, there = (value.to_local() if hasattr(value, "to_local") else value for value in (one, other))
    return one is other or (here.is_set_to(there) if type(here) is torch.Tensor else False)


@contextmanager
def _initial_state(optimizer: Optimizer) -> Iterator[bool]:
    """Let torch make the state of an optimizer that has none, and take it away again; tells whether it had none.

    (torch makes it by a step without gradients, which it does not where there are some.)
    """
    is_fresh = not optimizer.state
    params = [param for group in optimizer.param_groups for param in group["params"]] if is_fresh else []
    gradients = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield is_fresh
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        if is_fresh:
            optimizer.state.clear()


def _forget_the_step(states: dict[str, dict[str, Any]]) -> None:
    """Set the step count of state that one step without gradients has made back to 0."""
    for state in states.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0


__all__ = ["model_state", "optimizer_state", "owner", "parts_of"]

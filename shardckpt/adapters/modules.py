"""Modules and optimizers as state dicts by full names, and back: by torch's own state-dict API."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardckpt.errors import ShardingError
from shardckpt.tensors import step_without_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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


def buffers_among(values: Mapping[str, Any], parts: Sequence[Module]) -> frozenset[str]:
    """The names of those values of :func:`model_state` that are buffers: they lie in a buffer's memory."""
    places = {_place(buffer) for part in parts for buffer in part.buffers()} - {0}
    return frozenset(name for name, value in values.items() if _place(value) in places)


def optimizer_state(parts: Sequence[Module], optimizers: Sequence[Optimizer]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and group options of every parameter by full name: ``({name: state}, {name: options})``.

    A parameter that has no state yet (no step was made, or it had no gradient) is not among the states.

    Raises:
        ShardingError: two optimizers have the same parameter, or one has those of several parts.
    """
    states, options = _Merged("optimizer"), _Merged("optimizer")
    for number, optimizer in enumerate(optimizers):
        with without_initial_state(optimizer):
            found: Any = get_optimizer_state_dict(owner(parts, optimizer, number), optimizer)
        states.add(number, {name: state for name, state in found["state"].items() if state})
        for group in found["param_groups"]:
            given = {name: value for name, value in group.items() if name != "params"}
            options.add(number, dict.fromkeys(group["params"], given))
    return states.values, options.values


def initial_state(parts: Sequence[Module], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """State as the optimizers make it for parameters that have none yet, by full name: memory that a load can fill.

    Its values mean nothing, and the optimizers do not keep it. FSDP1 gives one state for parameters that it has made
    one, so under it only an optimizer without any state counts; and so of optimizers that are not torch's own, whose
    step may be collective, or not take zeros.

    Raises:
        ShardingError: two optimizers have the same parameter, or one has those of several parts.
    """
    states = _Merged("optimizer")
    for number, optimizer in enumerate(optimizers):
        part = owner(parts, optimizer, number)
        if optimizer.state and (not _steps_alone(optimizer) or FullyShardedDataParallel.fsdp_modules(part)):
            continue
        lacking = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad and not optimizer.state.get(param)
        ]
        with _made_state(optimizer, lacking) as is_made:
            found: Any = get_optimizer_state_dict(part, optimizer)["state"] if is_made else {}
        states.add(number, {name: state for name, state in found.items() if state})
    return states.values


def _steps_alone(optimizer: Optimizer) -> bool:
    """Whether a step with some gradients needs neither other ranks nor a closure: torch's own, but for LBFGS."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


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


def _place(value: Any) -> int:
    """Where in memory the values of a tensor begin, of a DTensor this rank's; 0 for any other value."""
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() if type(local) in (torch.Tensor, torch.nn.Buffer) else 0


@contextmanager
def without_initial_state(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch from making state for an optimizer that has none: it takes memory, and is not the true initial state.

    (It comes of a step with a learning rate of 0, which Rprop and NAdam remember.)
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    is_fresh = not optimizer.state
    if is_fresh:
        optimizer.state.update({param: {} for param in params})
    try:
        yield
    finally:
        if is_fresh and not any(optimizer.state.values()):
            optimizer.state.clear()


@contextmanager
def _made_state(optimizer: Optimizer, lacking: Sequence[Any]) -> Iterator[bool]:
    """Have an optimizer make the state of parameters that lack it, and take it away again; tells whether it has any.

    As torch does it for an optimizer without any state: by a step with gradients of zero and a learning rate of 0,
    which changes no parameter. Parameters with state have no gradient in it, so theirs stays.
    """
    before = {param: optimizer.state[param] for param in lacking if param in optimizer.state}
    params = [param for group in optimizer.param_groups for param in group["params"]] if lacking else []
    gradients = [param.grad for param in params]
    options = [dict(group) for group in optimizer.param_groups]
    counted = [(value, value.clone()) for group in options for value in group.values() if torch.is_tensor(value)]
    try:
        if lacking:
            _make_state(optimizer, params, lacking)
        yield any(optimizer.state.get(param) for param in lacking)
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        for group, saved in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(saved)
        for value, saved_value in counted:
            value.copy_(saved_value)
        for param in lacking:
            optimizer.state.pop(param, None)
        optimizer.state.update(before)


def _make_state(optimizer: Optimizer, params: Sequence[Any], lacking: Sequence[Any]) -> None:
    for param in params:
        param.grad = None
    for param in lacking:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
    step_without_hooks(optimizer)
    for param in lacking:
        param.grad = None


__all__ = ["initial_state", "model_state", "optimizer_state", "owner", "parts_of", "without_initial_state"]

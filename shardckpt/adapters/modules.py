"""State dicts of modules and optimizers by full parameter names, through torch's own state-dict API."""

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


def as_parts(model: Any) -> list[Module]:
    """Return the list of modules for one module, or for a list of this rank's pipeline stages.

    Raises:
        ShardingError: ``model`` is neither.
    """
    parts = list(model) if isinstance(model, (list, tuple)) else [model]
    for part in parts:
        if not isinstance(part, torch.nn.Module):
            raise ShardingError(f"expected a state dict, a module or a list of modules, got a {type(part).__name__}")
    return parts


def get_model_tensors(parts: Sequence[Module]) -> dict[str, Any]:
    """Return the parameters and buffers of all modules by full name, without the prefixes of wrappers.

    Args:
        parts: The modules of this rank.

    Returns:
        Tensors by name: DTensors and ShardedTensors as FSDP has them, plain tensors else. They share the modules'
        memory.

    Raises:
        ShardingError: two modules have different tensors of the same name.
    """
    merged = _MergedValues("model part")
    for number, part in enumerate(parts):
        merged.add(number, get_model_state_dict(part))
    return merged.values


def find_buffers(values: Mapping[str, Any], parts: Sequence[Module]) -> frozenset[str]:
    """Return the names of those values of :func:`get_model_tensors` that share a buffer's memory."""
    # 0 is no address: values that are not tensors, and tensors without memory
    places = {_data_address(buffer) for part in parts for buffer in part.buffers()} - {0}
    return frozenset(name for name, value in values.items() if _data_address(value) in places)


def get_optimizer_state(
    parts: Sequence[Module], optimizers: Sequence[Optimizer]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state and the group options of every parameter: ``({name: state}, {name: options})``.

    A parameter without state (no step was made, or it had no gradient) is not among the states.

    Raises:
        ShardingError: two optimizers have the same parameter, or one has those of several parts.
    """
    states, options = _MergedValues("optimizer"), _MergedValues("optimizer")
    for number, optimizer in enumerate(optimizers):
        with suppress_initial_state(optimizer):
            found: Any = get_optimizer_state_dict(find_owner(parts, optimizer, number), optimizer)
        states.add(number, {name: state for name, state in found["state"].items() if state})
        for group in found["param_groups"]:
            given = {name: value for name, value in group.items() if name != "params"}
            options.add(number, dict.fromkeys(group["params"], given))
    return states.values, options.values


def make_initial_state(parts: Sequence[Module], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Make state for the parameters that have none, by full name: memory for a load to fill.

    Its values are not meaningful, and the optimizers do not keep it. Under FSDP1, and for optimizers that are not
    torch's own, this is done only for an optimizer without any state: FSDP1 keeps one state for all parameters of a
    flat parameter, and the step of another optimizer may be collective, or fail for gradients of zero.

    Raises:
        ShardingError: two optimizers have the same parameter, or one has those of several parts.
    """
    states = _MergedValues("optimizer")
    for number, optimizer in enumerate(optimizers):
        part = find_owner(parts, optimizer, number)
        if optimizer.state and (not _steps_alone(optimizer) or FullyShardedDataParallel.fsdp_modules(part)):
            continue
        lacking = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad and not optimizer.state.get(param)
        ]
        with _temporary_state(optimizer, lacking) as has_state:
            found: Any = get_optimizer_state_dict(part, optimizer)["state"] if has_state else {}
        states.add(number, {name: state for name, state in found.items() if state})
    return states.values


def _steps_alone(optimizer: Optimizer) -> bool:
    """Return whether a step with some gradients needs no other rank and no closure: torch's own, except LBFGS."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def find_owner(parts: Sequence[Module], optimizer: Optimizer, number: int) -> Module:
    """Return the module that has all parameters of an optimizer.

    Raises:
        ShardingError: no module has all of them.
    """
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    owned = [params & {id(param) for param in part.parameters()} for part in parts]
    for part, mine in zip(parts, owned, strict=True):
        if mine == params:
            return part
    holders = [str(index) for index, mine in enumerate(owned) if mine]
    where = f"spread over modules {', '.join(holders)}" if len(holders) > 1 else "not all in the model"
    raise ShardingError(
        f"the parameters of optimizer {number} are {where}: make one optimizer for each module, after the model was "
        "wrapped, and pass all of them"
    )


class _MergedValues:
    """Values by name from several sources, whose names must not collide.

    Args:
        kind: What the sources are, for errors.
    """

    def __init__(self, kind: str) -> None:
        self.values: dict[str, Any] = {}
        self._kind = kind
        self._sources: dict[str, int] = {}

    def add(self, source: int, values: dict[str, Any]) -> None:
        """Add the values of the source of this number."""
        for name, value in values.items():
            if name in self.values and not _is_same(self.values[name], value):
                raise ShardingError(
                    f"{name!r} is in {self._kind} {self._sources[name]} and in {self._kind} {source}, with different "
                    "values: names must be unique in the model (give each part its own prefix or layer numbers)"
                )
            self.values[name] = value
            self._sources.setdefault(name, source)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether both are one object or one tensor's memory, as shared parameters are."""
    if not isinstance(one, torch.Tensor) or type(one) is not type(other):
        return one is other
    with torch.no_grad():
        here, there = (value.to_local() if hasattr(value, "to_local") else value for value in (one, other))
    return one is other or (here.is_set_to(there) if type(here) is torch.Tensor else False)


def _data_address(value: Any) -> int:
    """Return the address of a tensor's memory (of a DTensor, its local tensor's); 0 for any other value."""
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() if type(local) in (torch.Tensor, torch.nn.Buffer) else 0


@contextmanager
def suppress_initial_state(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch's state-dict functions from making state for an optimizer that has none.

    They make it by a step with a learning rate of 0. This takes memory, and it is not the true initial state: Rprop and
    NAdam remember the learning rate.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    is_fresh = not optimizer.state
    if is_fresh:
        # torch makes state only for an optimizer whose state is empty
        optimizer.state.update({param: {} for param in params})
    try:
        yield
    finally:
        if is_fresh and not any(optimizer.state.values()):
            optimizer.state.clear()


@contextmanager
def _temporary_state(optimizer: Optimizer, lacking: Sequence[Any]) -> Iterator[bool]:
    """Make state for the parameters that lack it, and remove it at the end; yields whether the optimizer made any.

    Like torch, it makes a step with gradients of zero and a learning rate of 0, which changes no parameter. Parameters
    with state get no gradient for this step, so their state stays.
    """
    # an optimizer may have an empty entry for a parameter: it is put back at the end
    before = {param: optimizer.state[param] for param in lacking if param in optimizer.state}
    params = [param for group in optimizer.param_groups for param in group["params"]] if lacking else []
    gradients = [param.grad for param in params]
    options = [dict(group) for group in optimizer.param_groups]
    # a step may change options that are tensors in place
    tensors = [(value, value.clone()) for group in options for value in group.values() if torch.is_tensor(value)]
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
        for value, saved_value in tensors:
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


__all__ = [
    "as_parts",
    "find_owner",
    "get_model_tensors",
    "get_optimizer_state",
    "make_initial_state",
    "suppress_initial_state",
]

"""State of modules and optimizers by full parameter names; torch's own API reads FSDP1 and classes that rename."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardckpt.adapters.module_tree import list_state_tensors, name_parameters, read_state_dict
from shardckpt.errors import ShardingError, listed
from shardckpt.tensors import ORDINARY, step_without_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer


def as_parts(model: Any) -> list[Module]:
    """Return the list of modules for a module, or for a list of pipeline stages; raise ShardingError for others."""
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
        Tensors by name, detached: DTensors and ShardedTensors as FSDP has them, plain tensors else. They share the
        modules' memory.

    Raises:
        ShardingError: two modules have different tensors of the same name.
    """
    with torch.no_grad():
        values = read_model_tensors(parts).items()
        return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values}


def read_model_tensors(parts: Sequence[Module]) -> dict[str, Any]:
    """Return the same tensors, but those that are parameters or buffers themselves: detaching many takes its time."""
    return _merge("model part", map(_read_tensors, parts))


def _read_tensors(part: Module) -> dict[str, Any]:
    found = list_state_tensors(part)
    if found is not None:
        return found
    read = read_state_dict(part)
    return get_model_state_dict(part) if read is None else read[0]


def find_buffers(values: Mapping[str, Any], parts: Sequence[Module]) -> frozenset[str]:
    """Return the names of those values of :func:`read_model_tensors` that share a buffer's memory."""
    # 0 is no address: values that are not tensors, and tensors without memory
    places = {_data_address(buffer) for part in parts for buffer in part.buffers()} - {0}
    return frozenset(name for name, value in values.items() if _data_address(value) in places)


class OptimizerState(NamedTuple):
    """The state of all optimizers, by the full names of the parameters.

    Attributes:
        states: The state of each parameter; one without state (no step was made, or it had no gradient) is not there.
        options: The options of each parameter's group.
        groups: The groups of all optimizers, as torch's ``get_optimizer_state_dict`` returns them.
    """

    states: dict[str, Any]
    options: dict[str, Any]
    groups: list[dict[str, Any]]


def get_optimizer_state(parts: Sequence[Module], optimizers: Sequence[Optimizer]) -> OptimizerState:
    """Return the state of all optimizers.

    Raises:
        ShardingError: two optimizers have the same parameter, or one has those of several parts.
    """
    found = [_read_optimizer(parts, optimizer, number) for number, optimizer in enumerate(optimizers)]
    options: list[dict[str, Any]] = [{} for _ in found]
    for own, each in zip(options, found, strict=True):
        for group in each["param_groups"]:
            # the names of all of the group's parameters, where it was made of named_parameters(), are no option of each
            shared = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            own.update(dict.fromkeys(group["params"], shared))
    states = _merge("optimizer", (_drop_empty(each["state"]) for each in found))
    groups = [group for each in found for group in each["param_groups"]]
    return OptimizerState(states, _merge("optimizer", options), groups)


def get_param_groups(parts: Sequence[Module], optimizer: Optimizer, number: int) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, with the full names of the parameters under ``params``.

    Args:
        parts: The modules of this rank.
        optimizer: The optimizer; it does not change.
        number: Its position among the optimizers, for errors.

    Returns:
        Its groups, as torch's ``get_optimizer_state_dict`` gives them.

    Raises:
        ShardingError: no single module has all parameters of the optimizer.
    """
    return _read_optimizer(parts, optimizer, number)["param_groups"]  # type: ignore[no-any-return]


def _read_optimizer(parts: Sequence[Module], optimizer: Optimizer, number: int) -> Any:
    owner = find_owner(parts, optimizer, number)
    names = name_parameters(owner)
    if names is not None and "state_dict" not in vars(optimizer):  # else torch or the user has replaced it
        return _name_state(optimizer, names)
    with suppress_initial_state(optimizer):
        return get_optimizer_state_dict(owner, optimizer)


def _name_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state dict with the names of parameters in place of their numbers, as torch's function."""
    with torch.no_grad():
        found = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    by_number = {number: names[id(param)] for number, param in enumerate(params)}
    others = [repr(key) for key in found["state"] if key not in by_number]
    if others:
        raise ShardingError(
            f"the optimizer has state under {listed(others)}, which is no parameter of it: only the state "
            "of parameters is stored. Keep such values elsewhere, and save them as a state of their own"
        )
    state = {by_number[number]: values for number, values in found["state"].items()}
    groups = [{**group, "params": [by_number[number] for number in group["params"]]} for group in found["param_groups"]]
    return {"state": state, "param_groups": groups}


def make_initial_state(parts: Sequence[Module], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return new state for the parameters that have none, nested dicts by full name: memory for a load to fill.

    Its values are not meaningful, and the optimizers do not keep it.

    Raises:
        ShardingError: As :func:`get_optimizer_state`; or an optimizer is an LBFGS, whose state cannot be made.
    """
    states: list[dict[str, Any]] = [{} for _ in optimizers]
    for number, optimizer in enumerate(optimizers):
        part = find_owner(parts, optimizer, number)
        # FSDP1 keeps one state for all parameters of a flat parameter, and a step of an optimizer that is not torch's
        # own may be collective, or fail for gradients of zero: then only an optimizer without any state makes some
        is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        steps_alone = is_torchs and not isinstance(optimizer, torch.optim.LBFGS)  # which needs a closure
        if optimizer.state and (not steps_alone or FullyShardedDataParallel.fsdp_modules(part)):
            continue
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ShardingError(
                f"optimizer {number} is an LBFGS without state, and a load needs to know its state's structure, which "
                "grows with the steps: save optimizer.state_dict() as an object, "
                "shardckpt.ShardedObject('lbfgs', optimizer.state_dict(), (1,), (0,)), and pass what a load of "
                "that object returns to optimizer.load_state_dict"
            )
        names = name_parameters(part)
        lacking = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if (names is not None or param.requires_grad) and not optimizer.state.get(param)
        ]
        with _temporary_state(optimizer, lacking) as has_state:
            found: Any
            if not has_state:
                found = {}
            elif names is None:
                found = get_optimizer_state_dict(part, optimizer)["state"]
            else:
                found = {names[id(param)]: optimizer.state[param] for param in lacking if param in optimizer.state}
        states[number] = _drop_empty(found)
    return _merge("optimizer", states)


def _drop_empty(states: dict[str, Any]) -> dict[str, Any]:
    return {name: state for name, state in states.items() if state}


def find_owner(parts: Sequence[Module], optimizer: Optimizer, number: int) -> Module:
    """Return the module that has all parameters of an optimizer; raise ShardingError if none has."""
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


def _merge(kind: str, sources: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of all sources of a kind by name; raise if two have different values under one name."""
    found = list(sources)
    if len(found) == 1:
        return dict(found[0])
    merged: dict[str, tuple[int, Any]] = {}
    for source, values in enumerate(found):
        for name, value in values.items():
            first, other = merged.setdefault(name, (source, value))
            if value is not other and not share_memory(other, value):  # parts may share a parameter: tied embeddings
                raise ShardingError(
                    f"{name!r} is in {kind} {first} and in {kind} {source}, with different values: names must be "
                    "unique in the model (give each part its own prefix or layer numbers)"
                )
    return {name: value for name, (_, value) in merged.items()}


def share_memory(one: Any, other: Any) -> bool:
    """Return whether both are tensors of one class with the same memory, sizes and strides."""
    if not isinstance(one, torch.Tensor) or type(one) is not type(other):
        return False
    with torch.no_grad():
        here, there = (value.to_local() if isinstance(value, DTensor) else value for value in (one, other))
    return type(here) in ORDINARY and here.is_set_to(there)


def _data_address(value: Any) -> int:
    """Return the address of a tensor's memory (of a DTensor, its local tensor's); 0 for any other value."""
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() if type(local) in (*ORDINARY, torch.nn.Buffer) else 0


@contextmanager
def suppress_initial_state(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch's state-dict functions from making state for an optimizer that has none."""
    # They make it by a step with a learning rate of 0. This takes memory, and it is not the true initial state: Rprop
    # and NAdam remember the learning rate.
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
    """Make state for the parameters that lack it, and remove it at the end; yields whether the optimizer made any."""
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
    # Like torch: a step with gradients of zero and a learning rate of 0 changes no parameter. Parameters with state get
    # no gradient, so their state stays.
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

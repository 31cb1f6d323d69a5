"""The state of optimizers to save, by full parameter names.

An optimizer's ``state_dict()`` has the state of each parameter, the options of each group, and other entries of the
class: entries of its own, state under keys that are no parameters. All of it is stored. A load asks for the stored
state, whether or not the optimizer has it already (:mod:`~shardckpt.adapters.optimizer_requests`); torch's
``get_optimizer_state_dict`` takes a step to find out.
"""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from shardckpt.adapters import fsdp1
from shardckpt.adapters.forms import (
    describe_nested,
    describe_with_form,
    flatten_state,
    is_self_describing,
    join_layout,
    list_tensors,
    make_form,
)
from shardckpt.adapters.group_options import GROUPS, PARAMS, STATE, digest_names, list_options
from shardckpt.adapters.leaves import describe_tree
from shardckpt.adapters.module_tree import name_parameters
from shardckpt.adapters.modules import merge_sources
from shardckpt.errors import ShardingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torch.nn import Module
    from torch.optim import Optimizer

    from shardckpt.adapters.dtensor import LayoutCache
    from shardckpt.adapters.forms import Layout
    from shardckpt.adapters.module_tree import StateColumns
    from shardckpt.mapping.base import Replicated

#: The parts of an optimizer besides the state and options of parameters, see :attr:`NamedState.others`.
ENTRIES, EMPTY = "entries", "empty groups"


class NamedState(NamedTuple):
    """The state of one optimizer by the full names of its parameters.

    Attributes:
        params: The parameters; none of FSDP1's.
        state: The state of each parameter; one without state (no step was made, or it had no gradient) is not there.
        groups: The groups, with names under ``params``.
        others: Entries that belong to no parameter: under ``entries`` those of the state dict besides state and groups,
            under ``state`` those whose keys are no parameters, under ``empty groups`` their options by number. Without
            empty ones.
        number: The position of the optimizer.
        is_flat: Whether torch alone knows how names and tensors belong together (FSDP1).
        has_groups: Whether the optimizer's own state dict has state and groups; wrappers have their own structure.
    """

    params: dict[str, torch.Tensor]
    state: dict[str, Any]
    groups: list[dict[str, Any]]
    others: dict[str, Any]
    number: int
    is_flat: bool = False
    has_groups: bool = True

    @property
    def digest(self) -> str:
        """A short text that optimizers of the same parameters, in their order, have in common."""
        return digest_names(self.names or [str(self.number)])

    @property
    def names(self) -> list[str]:
        """The names of the parameters, by their numbers."""
        return [name for group in self.groups for name in group[PARAMS]]


class OptimizerState(NamedTuple):
    """The state of all optimizers together.

    Attributes:
        each: That of each optimizer.
        names: The names of all parameters.
        params: The parameters of all by name, except FSDP1's.
        states: The state of each parameter.
    """

    each: list[NamedState]
    names: list[str]
    params: dict[str, torch.Tensor]
    states: dict[str, Any]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for one in self.each for group in one.groups]


def get_optimizer_state(
    parts: Sequence[Module], optimizers: Sequence[Optimizer], columns: Iterable[StateColumns | None] = ()
) -> OptimizerState:
    """Return the state of all optimizers.

    It is a ShardingError if two optimizers have the same parameter, or one has parameters of several parts.
    """
    named = name_parts(parts, columns) if optimizers else []
    each = [read_optimizer(named, optimizer, number) for number, optimizer in enumerate(optimizers)]
    owners: dict[str, NamedState] = {}
    for one in each:
        for name in one.names:
            if owners.setdefault(name, one) is not one:
                raise ShardingError(
                    f"{name!r} is in optimizer {owners[name].number} and in optimizer {one.number}: leave it in one of "
                    "them, or give each part of the model names of its own"
                )
    return OptimizerState(
        each,
        list(owners),
        {name: param for one in each for name, param in one.params.items()},
        {name: state for one in each for name, state in one.state.items()},
    )


def get_param_groups(parts: Sequence[Module], optimizer: Optimizer, number: int) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, as torch's ``get_optimizer_state_dict`` gives them.

    The full names of the parameters are under ``params``. It is a ShardingError if no single module has all of them.
    """
    return read_optimizer(name_parts(parts), optimizer, number).groups


class NamedPart(NamedTuple):
    """A module, and its parameters, which are looked for once for all optimizers.

    ``params`` are their ids; ``names`` are their names by id, None if torch must be asked.
    """

    module: Module
    params: AbstractSet[int]
    names: Mapping[int, str] | None


def name_parts(parts: Iterable[Module], columns: Iterable[StateColumns | None] = ()) -> list[NamedPart]:
    """Return the modules with their parameters as they are now.

    If the tensors of each are listed (``columns``), modules are not examined again.
    """
    found = []
    for part, listed in zip_longest(parts, columns):
        names = name_parameters(part) if listed is None else listed.name_parameters()
        found.append(NamedPart(part, {*map(id, part.parameters())} if names is None else names.keys(), names))
    return found


def read_optimizer(parts: Sequence[NamedPart], optimizer: Optimizer, number: int) -> NamedState:
    """Return the state of one optimizer; arguments and errors are as for :func:`get_param_groups`."""
    owner = find_owner(parts, optimizer, number)
    if owner.names is None:
        found = fsdp1.get_state(owner.module, optimizer)
        return NamedState({}, _drop_empty(found[STATE]), found[GROUPS], {}, number, is_flat=True)
    return _name_state(optimizer, owner.names, number)


def _name_state(optimizer: Optimizer, names: Mapping[int, str], position: int) -> NamedState:
    """Return an optimizer's state dict with the names of parameters in place of their numbers."""
    with torch.no_grad():
        found = _read_state_dict(optimizer, position)
    params = [param for group in optimizer.param_groups for param in group[PARAMS]]
    by_number = dict(enumerate(map(names.__getitem__, map(id, params))))
    # wrappers have their optimizer inside, and hooks may give other names to parameters
    has_groups = (
        isinstance(found.get(STATE), dict)
        and isinstance(found.get(GROUPS), list)
        and all(map(by_number.__contains__, chain.from_iterable(group[PARAMS] for group in found[GROUPS])))
    )
    if has_groups:
        state = {by_number[number]: values for number, values in found[STATE].items() if number in by_number}
        groups = [{**group, PARAMS: list(map(by_number.__getitem__, group[PARAMS]))} for group in found[GROUPS]]
        others = {
            ENTRIES: {name: value for name, value in found.items() if name not in (STATE, GROUPS)},
            STATE: {k: v for k, v in found[STATE].items() if k not in by_number}
            if len(state) < len(found[STATE])
            else {},
        }
    else:
        state, others = {}, {ENTRIES: dict(found)}
        groups = [{**group, PARAMS: [names[id(param)] for param in group[PARAMS]]} for group in optimizer.param_groups]
    others[EMPTY] = {number: list_options(group) for number, group in enumerate(groups) if not group[PARAMS]}
    named = dict(zip(by_number.values(), params, strict=True))
    return NamedState(named, _drop_empty(state), groups, _drop_empty(others), position, has_groups=has_groups)


def _read_state_dict(optimizer: Optimizer, position: int) -> dict[str, Any]:
    """Return an optimizer's state dict; one that ranks must gather first (ZeroRedundancyOptimizer) is refused."""
    try:
        return own_method(optimizer, "state_dict")()  # type: ignore[no-any-return]
    except RuntimeError as exc:
        if not hasattr(optimizer, "consolidate_state_dict"):
            raise
        raise ShardingError(
            f"optimizer {position}, a {type(optimizer).__name__}, has the state of this rank's parameters alone, and "
            "its state_dict() needs all: give it to a CheckpointManager, which saves and loads the part of each rank, "
            "CheckpointManager(config, {'model': model, 'optimizer': optimizer}), after the first steps where "
            "overlap_with_ddp makes its inner optimizer in these"
        ) from exc


def own_method(optimizer: Optimizer, name: str) -> Callable[..., Any]:
    """Return an optimizer's method, its class's where torch's state-dict functions have replaced it."""
    method: Callable[..., Any] = getattr(optimizer, name)
    is_replaced = name in vars(optimizer) and method.__module__ == get_optimizer_state_dict.__module__
    return getattr(type(optimizer), name).__get__(optimizer) if is_replaced else method


def _drop_empty(states: dict[str, Any]) -> dict[str, Any]:
    return {name: state for name, state in states.items() if state}


def describe_state(
    values: Any, key: str, replicated: Replicated, cache: LayoutCache, layout: Layout | None
) -> dict[str, Any]:
    """Describe the state of a parameter below a key: tensors and other values one by one, or with its form.

    ``layout`` is the layout of the parameter, if it is a DTensor.
    """
    if is_self_describing(values, layout):
        return describe_tree(values, key, replicated, objects=True, cache=cache)  # type: ignore[no-any-return]
    return describe_nested(values, key, replicated, cache, layout)


def describe_others(one: NamedState, key: str, replicated: Replicated, cache: LayoutCache) -> dict[str, Any]:
    """Describe the values of an optimizer other than the state of parameters: tensors, and the form.

    The key of a tensor that is sharded as a parameter names it: a load must know before it has read the form.
    """
    flat = flatten_state(one.others, shards=False)
    return describe_with_form(make_form(flat), list_slots(flat, one.params), key, replicated, cache)


def list_slots(flat: Any, params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors by their dotted paths, followed by the parameter that each DTensor is sharded as."""
    return {
        join_layout(path, _find_same_layout(tensor, params)) if isinstance(tensor, DTensor) else path: tensor
        for path, tensor in list_tensors(flat).items()
    }


def _find_same_layout(tensor: DTensor, params: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of a parameter of the same shape, mesh and placements; None if there is none."""
    layout = (tensor.shape, tensor.device_mesh, tensor.placements)
    dtensors = ((name, param) for name, param in params.items() if isinstance(param, DTensor))
    return next((n for n, param in dtensors if (param.shape, param.device_mesh, param.placements) == layout), None)


def make_flat_state(parts: Sequence[Module], optimizers: Sequence[Optimizer], live: OptimizerState) -> dict[str, Any]:
    """Return new state of the parameters of FSDP1 that have none, by name: memory for a load to fill."""
    # by names, which all ranks have gathered: a rank may have no elements of a parameter, and so no state of it
    flat = [one.number for one in live.each if one.is_flat and not one.state.keys() >= {*one.names}]
    named = name_parts(parts) if flat else []
    found = (fsdp1.make_state(find_owner(named, optimizers[n], n).module, optimizers[n]) for n in flat)
    made = merge_sources("optimizer", map(_drop_empty, found)) if flat else {}
    return {name: state for name, state in made.items() if name not in live.states}


def find_owner(parts: Sequence[NamedPart], optimizer: Optimizer, number: int) -> NamedPart:
    """Return the module that has all parameters of an optimizer; raise ShardingError if none has, or it has none."""
    if not hasattr(optimizer, GROUPS):
        raise ShardingError(
            f"optimizer {number}, a {type(optimizer).__name__}, has no param_groups that say which parameters it "
            "trains: pass the optimizer that it wraps, and save its own state_dict(), too"
        )
    params = {id(param) for group in optimizer.param_groups for param in group[PARAMS]}
    for part in parts:
        if params <= part.params:
            return part
    holders = [str(index) for index, part in enumerate(parts) if params & part.params]
    where = f"spread over modules {', '.join(holders)}" if len(holders) > 1 else "not all in the model"
    raise ShardingError(
        f"the parameters of optimizer {number} are {where}: make one optimizer for each module, after the model was "
        "wrapped, and pass all of them"
    )

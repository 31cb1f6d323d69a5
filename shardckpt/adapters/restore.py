"""Restore loaded values into modules and optimizers: bits, dtype and type of each value as it was saved."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from shardckpt.adapters import fsdp1
from shardckpt.adapters.dtensor import get_local_tensor, to_local
from shardckpt.adapters.forms import rebuild_state
from shardckpt.adapters.group_options import GROUPS, OTHERS, PARAMS, STATE, name_group, spread_options
from shardckpt.adapters.kept_options import (
    choose_options,
    list_option_names,
    log_kept,
    replace_inner_options,
    select,
    set_options,
)
from shardckpt.adapters.module_tree import list_state_columns, list_state_tensors, only_copies, read_state_dict
from shardckpt.adapters.modules import as_parts, read_model, share_memory
from shardckpt.adapters.optimizers import EMPTY, ENTRIES, find_owner, name_parts, own_method, read_optimizer
from shardckpt.adapters.own_values import find_own_values
from shardckpt.adapters.torch_optimizers import check_classes_of_state
from shardckpt.adapters.versions import add_versions
from shardckpt.engine.gc_pause import pause_gc
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError, listed, show_given
from shardckpt.planning.dtypes import refuse_cast, refuse_changed_values
from shardckpt.state_dict import are_equal, dict_list_map_outplace
from shardckpt.tensors.torch_private import is_sharded_tensor
from shardckpt.tensors.wrappers import is_quantized
from shardckpt.validation.arguments import check_annotated
from shardckpt.validation.keys import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

    from shardckpt.adapters.optimizers import NamedState
    from shardckpt.mapping.base import StateDict

logger = logging.getLogger(__name__)


@pause_gc()
def load_into(
    loaded: StateDict,
    model_or_parts: Module | Sequence[Module],
    *optimizers: Optimizer,
    strict: bool = True,
    keep_options: Collection[str] | str | None = (),
) -> None:
    """Collective over the meshes of DTensors, if there are any: restore the loaded values into modules and optimizers.

    The groups of the optimizers get their options (lr, betas). Optimizer state that each rank had whole when it was
    saved, and that was loaded as a DTensor, is gathered.

    Args:
        loaded: The result of ``load`` for ``to_sharded_state_dict(model_or_parts, *optimizers)``.
        model_or_parts: The same modules.
        optimizers: The same optimizers.
        strict: Whether every parameter must have been loaded; if False, the others keep their values.
        keep_options: Names of options in ``param_groups`` whose live values stay while all else is loaded, such as
            ``("lr", "weight_decay")``; ``"all"`` for all that the groups have. They are logged. A scheduler whose state
            is loaded sets ``lr`` again at its next step. Some classes keep state in their groups (Prodigy's ``d``),
            which ``"all"`` does not load.

    Raises:
        KeyMismatchError: a parameter was not loaded; modules and optimizers do not change.
        CheckpointingException: parameters of one group were saved with different options, ``loaded`` does not have the
            structure of ``to_sharded_state_dict``, no group has an option of ``keep_options``, or one of torch's
            optimizers cannot use the state of another class. SGD, Muon and LBFGS ignore it: that is a warning.
        DtypeMismatchError: ``loaded`` has values that the dtype of a module's tensor cannot hold.
    """
    parts = as_parts(model_or_parts)
    _check_structure(loaded, with_optimizers=bool(optimizers))
    check_annotated(load_into, locals())
    kept_options = choose_options(keep_options, list_option_names(optimizers)) if keep_options else []
    model, optimizer_state = (loaded["model"], loaded["optimizer"]) if optimizers else (loaded, {})
    columns = list(map(list_state_columns, parts))
    named = name_parts(parts, columns) if optimizers else []
    live = [read_optimizer(named, optimizer, number) for number, optimizer in enumerate(optimizers)]
    own_groups = {name_group(group) for one in live for group in one.groups}
    options = spread_options(optimizer_state.get(GROUPS, {}), own_groups)
    live_tensors, _ = read_model(parts, columns)
    _check_casts(model, live_tensors, parts)
    if strict:
        trained = {name for one in live for name in one.names}
        _refuse(live_tensors.keys() - model.keys(), "model")
        _refuse(trained - options.keys(), "optimizer")
    params = {name: param for one in live for name, param in one.params.items()}
    states = {name: rebuild_state(each, params.get(name)) for name, each in optimizer_state.get(STATE, {}).items()}
    by_digest = {digest: rebuild_state(values) for digest, values in optimizer_state.get(OTHERS, {}).items()}
    others = [by_digest.get(one.digest, {}) if by_digest else {} for one in live]
    for number, (one, rest) in enumerate(zip(live, others, strict=True)):
        if not one.has_groups and not rest:
            raise KeyMismatchError(
                f"optimizer {number} has a state dict of its own structure, and nothing of it was loaded: the "
                "checkpoint has no optimizer with the same parameters in the same order"
            )
    filled = [
        [
            _apply_options(group, options, rest.get(EMPTY, {}).get(number), kept_options)
            for number, group in enumerate(one.groups)
        ]
        for one, rest in zip(live, others, strict=True)
    ]
    if kept_options:
        log_kept(kept_options, [(group, _find_options(group, options)) for one in live for group in one.groups])
    for optimizer, groups in zip(optimizers, filled, strict=True):
        _share_options(groups, optimizer.param_groups)
    check_classes_of_state(optimizers, [one.names for one in live], states)
    # everything is checked above, before the first module changes
    for part in parts:
        _hand_over_tensors(part, model)
    for number, (optimizer, one, groups) in enumerate(zip(optimizers, live, filled, strict=True)):
        own_options = [select(group, kept_options) for group in optimizer.param_groups]
        if one.is_flat:
            fsdp1.set_state(find_owner(named, optimizer, number).module, optimizer, states, groups)
        else:
            # a parameter that was saved without state has none now; one that was not keeps its own (strict=False)
            kept = {name for group in groups for name in group[PARAMS] if name not in options and name not in states}
            rest = replace_inner_options(others[number], one.others, kept_options) if kept_options else others[number]
            _hand_over(optimizer, one, groups, states, rest, kept)
        if kept_options:
            set_options(optimizer, own_options)


def _hand_over_tensors(part: Module, values: Mapping[str, Any]) -> None:
    """Give a module its own values, as its ``load_state_dict`` does."""
    live = list_state_tensors(part)
    if live is not None and only_copies(part) and _can_be_copied(live, values):
        # a load has filled nearly all of them in place; load_state_dict copies each onto itself, and looks at the
        # names of all of a module's parameters for each of its children
        with torch.no_grad():
            for name, tensor in live.items():
                value = values.get(name, tensor)
                if value is not tensor and not share_memory(value, tensor.detach()):
                    tensor.copy_(value)
        return
    versions = values.get(VERSIONS, {}).values()
    values = {name: value for name, value in values.items() if name != VERSIONS}
    read = read_state_dict(part)
    if read is None:
        set_model_state_dict(part, add_versions(part, values, versions), options=StateDictOptions(strict=False))
        return
    own = {key: values[name] for name, key in read.keys.items() if name in values}
    if found := find_own_values([part]):
        grown = {name: found.find_grown(name) for name in values if name not in read.keys}
        own |= {key: values[name] for name, key in grown.items() if key is not None}
    # parts that were not loaded are kept: load_into(strict=False)
    unused = part.load_state_dict(add_versions(part, own, versions), strict=False).unexpected_keys
    if unused:
        logger.warning("%s has no place for some of the loaded values: %s", type(part).__name__, listed(sorted(unused)))


def _check_casts(values: Mapping[str, Any], live: Mapping[str, Any], parts: Sequence[Module]) -> None:
    """Raise DtypeMismatchError if a caller's values in another dtype than the live tensors' would be changed or cut.

    Values that modules load by code of their own may have any dtype, except buffers.
    """
    cast = [
        (name, values[name], tensor)
        for name, tensor in live.items()
        if isinstance(tensor, torch.Tensor)
        and isinstance(values.get(name), torch.Tensor)
        and values[name].dtype != tensor.dtype
    ]
    own = find_own_values(parts) if cast else None
    for name, value, tensor in cast:
        if own is not None and name not in own.buffers and own.has(name):
            continue
        refuse_cast(name, value.dtype, tensor.dtype, advise=False)
        if not is_quantized(tensor) and not is_quantized(value) and not is_sharded_tensor(value):
            refuse_changed_values(name, get_local_tensor(value.detach()), tensor.dtype, advise=False)


def _can_be_copied(live: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> bool:
    """Return whether all values of a module's tensors have their shapes; else its ``load_state_dict`` says so."""
    return all(
        isinstance(values[name], torch.Tensor) and values[name].shape == tensor.shape
        for name, tensor in live.items()
        if name in values
    )


def _hand_over(
    optimizer: Optimizer,
    live: NamedState,
    groups: list[dict[str, Any]],
    states: Mapping[str, Any],
    others: Mapping[str, Any],
    kept: Collection[str],
) -> None:
    """Give an optimizer its state and the options of its groups, which have the full names of the parameters.

    A parameter that is absent from ``states`` has none; those in ``kept`` keep the state that they have. ``others`` has
    the loaded entries that belong to no parameter.
    """
    # load_state_dict casts the state that stands under the number of a parameter to the parameter's dtype, and takes
    # any other entry as it is: state that stands under the parameter itself keeps its bits. A class that overrides it
    # may look at the numbers. Hooks, and the class's __setstate__, run as for torch.save's users.
    load = own_method(optimizer, "load_state_dict")
    overrides = getattr(load, "__func__", None) is not torch.optim.Optimizer.load_state_dict
    exact: dict[Any, Any] = {}
    numbered: list[dict[str, Any]] = []
    names, first = live.names, 0
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        for number, name in enumerate(group[PARAMS], first):
            param = live.params[name]
            key = number if overrides else param
            if name in states:
                exact[key] = _move(states[name], param, group)
            elif name in kept and param in optimizer.state:
                exact[key] = optimizer.state[param]
        numbers = list(range(first, first + len(group[PARAMS])))
        numbered.append({**_place_options(group, own), PARAMS: numbers})
        first += len(numbers)
    # entries that were not saved, by an older release or another class, stay as they are
    entries = {**live.others.get(ENTRIES, {}), **others.get(ENTRIES, {})}
    load({STATE: {**exact, **others.get(STATE, {})}, GROUPS: numbered, **entries} if live.has_groups else entries)
    if overrides and live.has_groups:
        for number, values in exact.items():
            _undo_casts(optimizer.state.get(live.params[names[number]]), values)


def _place_options(group: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group with tensors on the devices of the live ones, or where the optimizer counts."""
    counts_there = live[PARAMS] and (group.get("capturable") or group.get("fused"))
    device = live[PARAMS][0].device if counts_there else None

    def place(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = live.get(name)
        return value.to(own.device if isinstance(own, torch.Tensor) else device or value.device)

    return {name: place(name, value) for name, value in group.items()}


def _undo_casts(found: Any, saved: Any) -> None:
    """Restore saved values that ``load_state_dict`` has only cast; other values that a class has made of them stay."""
    if isinstance(found, dict) and isinstance(saved, dict):
        keys: Iterable[Any] = found.keys() & saved.keys()
    elif isinstance(found, list) and isinstance(saved, list) and len(found) == len(saved):
        keys = range(len(found))
    else:
        return
    for key in keys:
        value, own = saved[key], found[key]
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
            there, here = to_local(value), to_local(own)
            if there.dtype != here.dtype and are_equal(there.to(here.dtype), here):
                found[key] = value
        elif isinstance(value, str) and isinstance(own, str) and own.startswith("<generator object"):
            found[key] = value  # torch rebuilds anything that can be iterated from a generator
        else:
            _undo_casts(own, value)


def _move(state: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state on the devices where load_state_dict puts it; nothing is cast."""
    # the step stays where it is, but where the optimizer counts on the device
    keeps_step = not (group.get("capturable") or group.get("fused"))

    def move(value: Any) -> Any:
        return value.to(param.device) if isinstance(value, torch.Tensor) and value.device != param.device else value

    return {
        key: value if key == "step" and keeps_step else dict_list_map_outplace(move, value)
        for key, value in state.items()
    }


def _apply_options(
    group: dict[str, Any],
    options: Mapping[str, dict[str, Any]],
    of_empty: Mapping[str, Any] | None,
    kept: Collection[str],
) -> dict[str, Any]:
    """Return a group with the options that its parameters were saved with; its own if none of them was saved.

    ``of_empty`` are the options of the group of its number, if that had no parameters. Options named in ``kept`` keep
    their values.
    """
    own = select(group, kept)
    if not group[PARAMS]:
        return {**group, **(of_empty or {}), **own}
    saved = [name for name in group["params"] if name in options]
    first = _find_options(group, options)
    for name in saved:
        if options[name] is first:  # the parameters of a stored group share them
            continue
        for option in dict.fromkeys([*first, *options[name]]):
            lacking = option not in first or option not in options[name]
            if option not in own and (lacking or not are_equal(first[option], options[name][option])):
                one, other = (repr(each[option]) if option in each else "(none)" for each in (first, options[name]))
                raise CheckpointingException(
                    f"{saved[0]!r} and {name!r} are in one group of the optimizer, but were saved with different "
                    f"values of {option}: {one} and {other}; group them as they were saved"
                )
    return {**group, **first, **own}


def _find_options(group: Mapping[str, Any], options: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the saved options of the first of a group's parameters that has some."""
    return next((options[name] for name in group[PARAMS] if name in options), {})


def _share_options(groups: list[dict[str, Any]], live: list[dict[str, Any]]) -> None:
    """Let groups have one list or dict as their option where the live ones have one: a default that steps change."""
    first: dict[tuple[str, int], Any] = {}
    for group, own in zip(groups, live, strict=True):
        for option, value in own.items():
            if option != PARAMS and isinstance(value, (list, dict)) and option in group:
                shared = first.setdefault((option, id(value)), group[option])
                if are_equal(shared, group[option]):
                    group[option] = shared


def _check_structure(loaded: StateDict, *, with_optimizers: bool) -> None:
    """Raise unless ``loaded`` has the structure that :func:`to_sharded_state_dict` gives."""
    if not isinstance(loaded, dict):
        raise ShardingError(
            f"load_into: {show_given(loaded)} in the place of the loaded state dict, which is first, then the model: "
            "load_into(load(...), model); strict='return_all' returns it as the first of a tuple"
        )
    has_both = {"model", "optimizer"} <= loaded.keys()
    if with_optimizers and not has_both:
        raise ShardingError(
            "the loaded state dict has no 'model' and 'optimizer': load to_sharded_state_dict(model, optimizer)"
        )
    if has_both and not with_optimizers and all(isinstance(part, dict) for part in loaded.values()):
        raise ShardingError("the loaded state dict has an optimizer: pass the optimizers too, or loaded['model'] alone")
    if has_both and not isinstance(loaded["optimizer"].get("param_groups", {}), dict):
        raise ShardingError(
            "the optimizer's part does not come from to_sharded_state_dict(model, optimizer): restore a state dict of "
            "torch's structure with torch's set_model_state_dict and set_optimizer_state_dict"
        )


def _refuse(missing: Collection[str], what: str) -> None:
    if missing:
        raise KeyMismatchError(
            f"the {what} has parameters that were not loaded: {listed(sorted(missing))}; "
            "load with to_sharded_state_dict of the same modules and optimizers, or keep theirs: "
            "load_into(..., strict=False)"
        )

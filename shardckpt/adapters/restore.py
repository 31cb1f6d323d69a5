"""Restore loaded values into modules and optimizers, through torch's own state-dict API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardckpt.adapters.modules import (
    as_parts,
    find_owner,
    get_param_groups,
    read_model_tensors,
    suppress_initial_state,
)
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError, listed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

    from shardckpt.mapping import StateDict


def load_into(
    loaded: StateDict,
    model_or_parts: Module | Sequence[Module],
    *optimizers: Optimizer,
    strict: bool = True,
) -> None:
    """Restore what was loaded into modules and optimizers, with the options of their groups (lr, betas).

    Args:
        loaded: What ``load`` returned for ``to_sharded_state_dict(model_or_parts, *optimizers)``.
        model_or_parts: The same modules.
        optimizers: The same optimizers.
        strict: Whether every parameter must have been loaded; if False, the others keep their values.

    Raises:
        KeyMismatchError: a parameter was not loaded; modules and optimizers do not change.
        CheckpointingException: parameters of one group were saved with different options, or ``loaded`` does not have
            the structure of ``to_sharded_state_dict``.
    """
    parts = as_parts(model_or_parts)
    _check_structure(loaded, with_optimizers=bool(optimizers))
    model, optimizer_state = (loaded["model"], loaded["optimizer"]) if optimizers else (loaded, {})
    options = {
        name: {**values.get("values", {}), **values.get("tensors", {})}  # undoes _describe_options
        for name, values in optimizer_state.get("param_groups", {}).items()
    }
    groups = [get_param_groups(parts, optimizer, number) for number, optimizer in enumerate(optimizers)]
    if strict:
        trained = {name for each in groups for group in each for name in group["params"]}
        _refuse(read_model_tensors(parts).keys() - model.keys(), "model")
        _refuse(trained - options.keys(), "optimizer")
    filled = [[_apply_options(group, options) for group in each] for each in groups]
    # everything is checked above, before the first module changes
    for part in parts:  # not strict: the values of other parts are skipped
        set_model_state_dict(part, dict(model), options=StateDictOptions(strict=False))
    states = optimizer_state.get("state", {})
    for number, (optimizer, own) in enumerate(zip(optimizers, filled, strict=True)):
        mine = {name: dict(states[name]) for group in own for name in group["params"] if name in states}
        with suppress_initial_state(optimizer):
            set_optimizer_state_dict(
                find_owner(parts, optimizer, number),
                optimizer,
                {"state": mine, "param_groups": own},  # type: ignore[dict-item]
                options=StateDictOptions(strict=False),
            )


def _apply_options(group: dict[str, Any], options: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a group with the options that its parameters were saved with; its own if none of them was saved."""
    saved = [name for name in group["params"] if name in options]
    for name in saved:
        for option, value in options[saved[0]].items():
            if option not in options[name] or not _is_equal(options[name][option], value):
                raise CheckpointingException(
                    f"{saved[0]!r} and {name!r} are in one group of the optimizer, but were saved with different "
                    f"values of {option}: {value!r} and {options[name].get(option)!r}; group them as they were saved"
                )
    return {**group, **options[saved[0]]} if saved else group


def _check_structure(loaded: StateDict, *, with_optimizers: bool) -> None:
    """Raise unless ``loaded`` has the structure that :func:`to_sharded_state_dict` gives."""
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


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)

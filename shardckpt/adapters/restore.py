"""Restore loaded values into modules and optimizers, through torch's own state-dict API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardckpt.adapters.modules import find_owner, suppress_initial_state
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer


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
    with suppress_initial_state(optimizer):
        found: Any = get_optimizer_state_dict(find_owner(parts, optimizer, number), optimizer)
    return found["param_groups"]  # type: ignore[no-any-return]


def apply_options(group: dict[str, Any], options: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a group with the options that its parameters were saved with; its own if none of them was saved.

    Raises:
        CheckpointingException: its parameters were saved with different options.
    """
    saved = [name for name in group["params"] if name in options]
    for name in saved:
        for option, value in options[saved[0]].items():
            if option not in options[name] or not _is_equal(options[name][option], value):
                raise CheckpointingException(
                    f"{saved[0]!r} and {name!r} are in one group of the optimizer, but were saved with different "
                    f"values of {option}: {value!r} and {options[name].get(option)!r}; group them as they were saved"
                )
    return {**group, **options[saved[0]]} if saved else group


def set_model(part: Module, values: Mapping[str, Any]) -> None:
    """Set those of the values that belong to a module."""
    set_model_state_dict(part, dict(values), options=StateDictOptions(strict=False))


def set_optimizer(
    part: Module, optimizer: Optimizer, states: Mapping[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Set the state of an optimizer's parameters, and its groups."""
    mine = {name: dict(states[name]) for group in groups for name in group["params"] if name in states}
    with suppress_initial_state(optimizer):
        set_optimizer_state_dict(
            part,
            optimizer,
            {"state": mine, "param_groups": [dict(group) for group in groups]},  # type: ignore[dict-item]
            options=StateDictOptions(strict=False),
        )


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


__all__ = ["apply_options", "get_param_groups", "set_model", "set_optimizer"]

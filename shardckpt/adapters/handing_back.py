"""What was loaded, handed back to modules and optimizers by torch's own state-dict API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardckpt.adapters.modules import owner, without_initial_state
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer


def groups_of(parts: Sequence[Module], optimizer: Optimizer, number: int) -> list[dict[str, Any]]:
    """The groups of an optimizer as they are, with the full names of their parameters under ``params``."""
    with without_initial_state(optimizer):
        found: Any = get_optimizer_state_dict(owner(parts, optimizer, number), optimizer)
    return found["param_groups"]  # type: ignore[no-any-return]


def with_options(group: dict[str, Any], options: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A group with the options that its parameters were saved with; with its own where none of them was.

    Raises:
        CheckpointingException: they were saved with different ones.
    """
    known = [name for name in group["params"] if name in options]
    for name in known:
        for option, value in options[known[0]].items():
            if option not in options[name] or not _is_equal(options[name][option], value):
                raise CheckpointingException(
                    f"{known[0]!r} and {name!r} are in one group of the optimizer, and were saved with different "
                    f"values of {option}: {value!r} and {options[name].get(option)!r}; group them as they were"
                )
    return {**group, **options[known[0]]} if known else group


def set_model(part: Module, values: Mapping[str, Any]) -> None:
    """Give a module its own among the values."""
    set_model_state_dict(part, dict(values), options=StateDictOptions(strict=False))


def set_optimizer(
    part: Module, optimizer: Optimizer, states: Mapping[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Give an optimizer the state of its parameters, and its groups."""
    mine = {name: dict(states[name]) for group in groups for name in group["params"] if name in states}
    with without_initial_state(optimizer):
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


__all__ = ["groups_of", "set_model", "set_optimizer", "with_options"]

"""Optimizers that other programs have saved by ``optimizer.state_dict()``: parameters are numbers there, not names."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from shardckpt.adapters.modules import get_model_tensors
from shardckpt.adapters.optimizers import get_param_groups
from shardckpt.errors import CheckpointingException
from shardckpt.manager.states import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
#: State tensors with the shape of their parameter, in the classes of torch.optim and most others.
_MOMENTS = ("exp_avg", "momentum_buffer")


def name_numbers(
    common: Mapping[Any, Any],
    where: str,
    shapes: Mapping[str, tuple[int, ...] | None],
    parts: Sequence[Module],
    optimizer: Optimizer,
) -> dict[str, str]:
    """Map the prefixes of stored keys that have numbers of parameters to prefixes that have their names.

    The numbers are taken in the order of the live optimizer's parameters, as its ``load_state_dict`` takes them. The
    result is empty if the parameters have names there. ``where`` is the prefix of its optimizer's keys, without the
    last dot; ``shapes`` has all keys that it stores, with the shapes of tensors that must have the shape of their
    parameter. It is an error if the groups have other numbers of parameters than the live optimizer's, or if moments
    have another shape than the parameter in their place.
    """
    stored = [group[_PARAMS] for group in _find_groups(common, where)]
    numbers = [*chain.from_iterable(stored)]
    if not numbers or not all(type(number) is int for number in numbers):
        return {}
    live = [group[_PARAMS] for group in get_param_groups(parts, optimizer, 0)]
    if [*map(len, stored)] != [*map(len, live)]:
        raise CheckpointingException(
            f"{where} of the checkpoint numbers its parameters, as optimizer.state_dict() does, and has groups of "
            f"{_count(stored)} parameters; those of the optimizer to load have {_count(live)}. Build it with the same "
            f"groups, in the same order, or put {OPTIMIZER!r} into exclude_from_loading"
        )
    before = f"{where}.{_STATE}."
    with_state = {key[len(before) :].partition(".")[0] for key in shapes if key.startswith(before)}
    tensors, found = get_model_tensors(parts), {}
    for number, name in zip(numbers, chain.from_iterable(live), strict=True):
        for slot in _MOMENTS:
            shape, param = shapes.get(f"{before}{number}.{slot}"), tensors.get(name)
            if shape is not None and param is not None and shape != tuple(param.size()):
                raise CheckpointingException(
                    f"{where} of the checkpoint numbers its parameters, as optimizer.state_dict() does, and {slot} of "
                    f"number {number} has the shape {shape}; in its place the optimizer to load has {name!r} of "
                    f"{tuple(param.size())}. Build it with the parameters in the order of the save, or put "
                    f"{OPTIMIZER!r} into exclude_from_loading"
                )
        found[f"{where}.{_GROUPS}.{number}"] = f"{OPTIMIZER}.{_GROUPS}.{name}"
        if str(number) in with_state:
            found[f"{before}{number}"] = f"{OPTIMIZER}.{_STATE}.{name}"
    return found


def _find_groups(common: Mapping[Any, Any], where: str) -> list[dict[str, Any]]:
    """Return the groups of an optimizer in nested dicts; none if they are not there as its state dict has them."""
    place: Any = common
    for part in (*where.split("."), _GROUPS):
        place = place.get(part) if isinstance(place, dict) else None
    is_list = isinstance(place, list) and all(isinstance(each, dict) for each in place)
    return place if is_list and all(isinstance(each.get(_PARAMS), list) for each in place) else []


def _count(groups: Sequence[Sequence[Any]]) -> str:
    return " and ".join(str(len(group)) for group in groups)

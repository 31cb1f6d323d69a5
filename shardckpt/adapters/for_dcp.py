"""Entries that stock ``dcp.load`` requests for an optimizer: group options and numbers of its state, by its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters.group_options import FEW_GROUPS, PARAMS, digest_names, make_marker
from shardckpt.adapters.leaves import describe_plain_object
from shardckpt.state_dict import nested_items

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.mapping.sharded_object import PlainObject

#: Classes of the values that optimizers of torch have.
_TENSORS = frozenset((torch.Tensor, DTensor))


def describe_groups(
    param_groups: list[dict[str, Any]], key: str, params: Collection[str], kept: GroupKeys
) -> dict[str, PlainObject]:
    """Describe the groups as stock ``dcp.load`` asks for them, in both forms of torch's ``get_optimizer_state_dict``.

    Nested: ``<key>.0.lr``, and the names of the parameters, ``<key>.0.params``. Flattened: ``<key>.<name>.lr`` for each
    parameter. An option is stored once, under its own key, and listed under all these keys. Ranks with the same
    parameters in a group have the same descriptions.
    """
    # the groups of each option and value; of few groups each keeps its own objects, so that a later save has as many as
    # the last
    groups_by_value: dict[tuple[str, Any], list[int]] = {}
    mark = make_marker() if len(param_groups) > FEW_GROUPS else None
    for number, group in enumerate(param_groups):
        for option, value in group.items():
            same = None if mark is None or option == PARAMS else mark(value)
            groups_by_value.setdefault((option, number if same is None else same), []).append(number)
    kept.begin([(*group[PARAMS],) for group in param_groups], key, frozenset(params))
    found = {}
    for (option, _), numbers in groups_by_value.items():
        value = param_groups[numbers[0]][option]
        own, keys = kept.find(option, numbers, by_name=option != PARAMS and not isinstance(value, torch.Tensor))
        if keys:
            found[own] = describe_plain_object(value, own, keys)
    return found


class GroupKeys:
    """The keys under which stock ``dcp.load`` looks for the options of groups: made once while they do not change."""

    def __init__(self) -> None:
        self._form: tuple[list[tuple[str, ...]], str, frozenset[str]] = [], "", frozenset()
        #: The name of each group. Pipeline stages have a group 0 each, of other parameters: both are stored.
        self._names: list[str] = []
        #: By an option, its groups, and whether it is listed by parameter: its own key, and the others. And the last.
        self._found: dict[tuple[str, tuple[int, ...], bool], tuple[str, tuple[str, ...]]] = {}
        self._last = self._found

    def begin(self, groups: list[tuple[str, ...]], key: str, params: frozenset[str]) -> None:
        """Begin a save of groups with these parameters; the others are as for :func:`describe_groups`."""
        self._last, self._found = self._found, {}
        if self._form != (groups, key, params):
            self._form, self._last = (groups, key, params), {}
            self._names = [f"{number}/{digest_names(names)}" for number, names in enumerate(groups)]

    def find(self, option: str, numbers: list[int], *, by_name: bool) -> tuple[str, tuple[str, ...]]:
        """Return the own key of an option that is equal in several groups, and those to find it by.

        With ``by_name`` it is listed under the names of parameters; tensors are there already.
        """
        place = option, (*numbers,), by_name
        self._found[place] = self._last.get(place) or self._make(option, numbers, by_name=by_name)
        return self._found[place]

    def _make(self, option: str, numbers: list[int], *, by_name: bool) -> tuple[str, tuple[str, ...]]:
        groups, key, params = self._form
        # a parameter whose name is a number, or a number and the name of an option, has its options there
        places = [f"{number}.{option}" for number in numbers if str(number) not in params]
        keys = [f"{key}.{place}" for place in places if place not in params]
        if by_name:
            keys += [f"{key}.{name}.{option}" for number in numbers for name in groups[number]]
        names = [self._names[number] for number in numbers]
        return f"{key}/{option}/{names[0] if len(names) == 1 else digest_names(names)}", (*keys,)


def describe_numbers(states: Mapping[str, Any], key: str) -> dict[str, PlainObject]:
    """Describe the optimizer's state that is not tensors (a step that is a number) as stock ``dcp.load`` asks for it.

    There is one description for each name of a value and each value, by its own key, listed for all parameters that
    have it.
    """
    names: dict[tuple[str, type[Any], Any], list[str]] = {}
    for name, state in states.items():
        if type(state) is dict and _TENSORS.issuperset(map(type, state.values())):  # nearly always
            continue
        for path, value in nested_items(state):
            if isinstance(value, (int, float, str, type(None))):
                names.setdefault((".".join(map(str, path)), type(value), value), []).append(name)
    found = {}
    for (option, _, value), having in names.items():
        own = f"{key}/{option}/{digest_names(having)}"
        found[own] = describe_plain_object(value, own, tuple(f"{key}.{name}.{option}" for name in having))
    return found

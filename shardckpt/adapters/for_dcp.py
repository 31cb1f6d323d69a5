"""What stock ``dcp.load`` asks for of an optimizer: options of groups and numbers of its state, under its keys."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters.leaves import describe_plain_object
from shardckpt.adapters.optimizers import FEW_GROUPS, PARAMS, digest_names
from shardckpt.state_dict import nested_items

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.mapping import PlainObject

_PLAIN = frozenset((int, float, bool, str, type(None)))
#: Classes of the values that optimizers of torch have.
_TENSORS = frozenset((torch.Tensor, DTensor))


def describe_groups(
    param_groups: list[dict[str, Any]], key: str, params: Collection[str], kept: GroupKeys
) -> dict[str, PlainObject]:
    """Describe the groups as stock ``dcp.load`` asks for them, in both forms of torch's ``get_optimizer_state_dict``.

    Nested: ``<key>.0.lr``, and the names of the parameters, ``<key>.0.params``. Flattened: ``<key>.<name>.lr`` for each
    parameter. An option is stored once, and listed under all these keys.

    Args:
        param_groups: The groups, with the names of their parameters.
        key: What the keys begin with.
        params: The names of all parameters.
        kept: Has the keys of the last save.

    Returns:
        The descriptions, by their own keys. Ranks with the same parameters in a group have the same.
    """
    # by option and value; of few groups each keeps its own objects, so that a later save has as many as the last
    alike: dict[Any, list[_GroupOption]] = {}
    for number, group in enumerate(param_groups):
        # pipeline stages have a group 0 each, of other parameters: both are stored
        digest = digest_names(group[PARAMS])
        for option, keys in kept.find(number, group, key, params).items():
            if keys:
                same = _mark_value(group[option]) if len(param_groups) > FEW_GROUPS else None
                place = (option, number if same is None else same)
                alike.setdefault(place, []).append(_GroupOption(f"{number}.{option}/{digest}", group[option], keys))
    found = {}
    for (option, _), each in alike.items():
        own, keys = f"{key}/{each[0].name}", each[0].keys
        if len(each) > 1:
            own = f"{key}/{option}/{digest_names(one.name for one in each)}"
            keys = tuple(chain.from_iterable(one.keys for one in each))
        found[own] = describe_plain_object(each[0].value, own, keys)
    return found


class _GroupOption(NamedTuple):
    """An option of a group: its name with that of the group, its value, and the keys to find it by."""

    name: str
    value: Any
    keys: tuple[str, ...]


def _mark_value(value: Any) -> tuple[Any, ...] | None:
    """Return what equal values of equal types have in common; None for others than plain values and tuples of them."""
    items = value if type(value) is tuple else (value,)
    return (type(value), repr(value)) if _PLAIN.issuperset(map(type, items)) else None


class GroupKeys:
    """The keys under which stock ``dcp.load`` looks for the options of groups: made once, as long as they are alike."""

    def __init__(self) -> None:
        #: By the number of a group: what its keys depend on, and the keys of each option.
        self._found: dict[int, tuple[tuple[Any, ...], dict[str, tuple[str, ...]]]] = {}

    def find(
        self, number: int, group: Mapping[str, Any], key: str, params: Collection[str]
    ) -> dict[str, tuple[str, ...]]:
        """Return the keys of each option; arguments as for :func:`describe_groups`."""
        names = group[PARAMS]
        # tensors are listed under the names of parameters already
        by_name = {name: name != PARAMS and not isinstance(value, torch.Tensor) for name, value in group.items()}
        # a parameter whose name is a number, or a number and the name of an option, has its options there
        taken = [option for option in by_name if str(number) in params or f"{number}.{option}" in params]
        form = (key, list(names), list(by_name.items()), taken)
        if number not in self._found or self._found[number][0] != form:
            keys = {
                option: (
                    *(() if option in taken else (f"{key}.{number}.{option}",)),
                    *([f"{key}.{name}.{option}" for name in names] if is_listed else ()),
                )
                for option, is_listed in by_name.items()
            }
            self._found[number] = form, keys
        return self._found[number][1]


def describe_numbers(states: Mapping[str, Any], key: str) -> dict[str, PlainObject]:
    """Describe the optimizer's state that is not tensors (a step that is a number) as stock ``dcp.load`` asks for it.

    Args:
        states: The state of each parameter, by its name.
        key: What the keys begin with.

    Returns:
        The descriptions, by their own keys: one for each name of a value and each value, listed for all parameters that
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

"""Options of parameter groups: an object a group with the names of its parameters, and tensors by parameter.

Of many groups, all are one object. Older checkpoints, and those of other libraries, have an object a parameter.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.adapters.leaves import describe_leaf, describe_object
from shardckpt.adapters.stored_values import find_slots, request_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from shardckpt.mapping.base import Replicated
    from shardckpt.mapping.unstored import StoredNames

#: Entries of an optimizer's state dict.
STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
#: An entry that torch does not have: the values that belong to no parameter, by a digest of the names of an optimizer's
#: parameters, so that they are loaded only into an optimizer of the same ones.
OTHERS = "others"
#: Classes of the values that are stored once for all groups that have them.
_PLAIN = frozenset((int, float, bool, str, type(None)))
#: The prefix of the names of stored groups, which no name of a parameter has.
GROUP_NAME = "(group "
#: The same of several groups that are one object: of more than FEW_GROUPS, which cost more than their content.
GROUPS_NAME = "(groups "
FEW_GROUPS = 16


def list_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group; the names of its parameters are no option of each."""
    return {name: value for name, value in group.items() if name not in (PARAMS, PARAM_NAMES)}


def digest_names(names: Iterable[str]) -> str:
    """Return a short digest of names in their order."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def name_group(group: Mapping[str, Any]) -> str:
    """Return the name under which the options of a group are stored: no parameter has such a one."""
    return f"{GROUP_NAME}{digest_names(group[PARAMS])})"


def name_groups(names: Iterable[str]) -> str:
    """Return the name under which groups are stored as one object, by the name of each."""
    return f"{GROUPS_NAME}{digest_names(names)})"


def is_group(name: str) -> bool:
    """Return whether this is the name of a stored group, or of several."""
    return name.startswith((GROUP_NAME, GROUPS_NAME))


def make_marker() -> Callable[[Any], str | None]:
    """Return a function that returns one text for equal values of equal types, if they are plain or tuples of such.

    For other values it returns None. It remembers each by its id: all must live as long as it is used.
    """
    marks: dict[int, str | None] = {}

    def mark(value: Any) -> str | None:
        if id(value) not in marks:
            items = value if type(value) is tuple else (value,)
            marks[id(value)] = repr(value) if _PLAIN.issuperset(map(type, items)) else None
        return marks[id(value)]

    return mark


def describe_options(groups: list[dict[str, Any]], key: str, replicated: Replicated) -> dict[str, Any]:
    """Describe the options of each group: names of parameters and plain values as one object, tensors by parameter.

    Of many groups, all are one object.
    """
    found: dict[str, dict[str, Any]] = {}
    objects: dict[str, dict[str, Any]] = {}
    for group in groups:
        if not group[PARAMS]:
            continue
        options = list_options(group)
        # copies, so that a load does not fill the live tensors before load_into has checked what was loaded
        copies = {n: value.detach().clone() for n, value in options.items() if isinstance(value, torch.Tensor)}
        plain = {n: value for n, value in options.items() if n not in copies} if copies else options
        objects[name_group(group)] = {PARAMS: group[PARAMS], "options": plain}
        for param in group[PARAMS] if copies else ():  # as stock dcp.load asks for them
            tensors = {n: describe_leaf(copy, f"{key}.{param}.{n}", replicated) for n, copy in copies.items()}
            found[param] = {"tensors": tensors}
    stored = {name_groups(objects): _share_plain_options(objects.values())} if len(objects) > FEW_GROUPS else objects
    described = {name: {"values": describe_object(each, f"{key}.{name}", replicated)} for name, each in stored.items()}
    return {**described, **found}


def _share_plain_options(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return stored groups that have one dict where their options are plain and equal: a pickle has it once."""
    mark, found, same = make_marker(), [], dict[Any, dict[str, Any]]()
    for group in groups:
        options = group["options"]
        marks = (*options, *map(mark, options.values()))
        found.append(group if None in marks else {**group, "options": same.setdefault(marks, options)})
    return found


def request_options(
    names: Iterable[str], stored: StoredNames, key: str, live: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the request of a load for the options: all stored groups, whose parameters only their objects name.

    If all groups of ``live`` are stored as they are, these alone: any other then counts as unused. It does not where
    the groups of a stage are more than ``FEW_GROUPS``, and so one object, or where a live one is not stored.
    Options that are tensors are stored by parameter, as stock ``dcp.load`` asks for them. Older checkpoints, and those
    of other libraries, have an object for each parameter, too. ``key`` is what the keys of options begin with, without
    the last dot.
    """
    rests = (each[len(key) + 1 :] for each in stored.objects if each.startswith(f"{key}."))
    groups = list(filter(is_group, rests))
    same = {name_group(group) for group in live if group[PARAMS]}
    if same and same.issubset(groups):
        groups = [name for name in groups if name in same]
    found: dict[str, Any] = {name: {"values": describe_object(None, f"{key}.{name}", "unchecked")} for name in groups}
    for name, options in find_slots(dict.fromkeys(names), stored, key, in_common=True).items():
        keys = {option: f"{key}.{name}.{option}" for option in options}
        tensors = {option: request_value(stored, own) for option, own in keys.items() if own in stored.tensors}
        entry = {} if groups else {"values": describe_object(None, f"{key}.{name}", "unchecked")}
        if tensors or entry:
            found[name] = entry | ({"tensors": tensors} if tensors else {})
    return found


def spread_options(loaded: Mapping[str, Any], live: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter; those of a group are one dict, if no tensor is among them.

    ``live`` has the names of groups, by :func:`name_group`, that count where others have the same parameter.
    """
    found: dict[str, dict[str, Any]] = {}
    objects = [parts["values"] for name, parts in loaded.items() if is_group(name)]
    groups = [group for each in objects for group in (each if isinstance(each, list) else [each])]
    for group in sorted(groups, key=lambda group: name_group(group) in live):
        found.update(dict.fromkeys(group[PARAMS], group["options"]))
    for name, parts in loaded.items():
        if not is_group(name):
            found[name] = {**found.get(name, {}), **parts.get("values", {}), **parts.get("tensors", {})}
    return found

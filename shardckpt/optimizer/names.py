"""Parse the names under which optimizer state is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.adapters import find_name, is_group

if TYPE_CHECKING:
    from collections.abc import Collection

STATE, GROUPS, OTHERS = "state", "param_groups", "others"


class StateName(NamedTuple):
    """A parsed name of a stored value.

    Attributes:
        kind: ``"state"`` or ``"param_groups"``; ``""`` for a value that is neither.
        owner: The parameter's full name, or the number or name of a group; None for a value that is neither.
        path: The path below the owner.
    """

    kind: str
    owner: str | int | None
    path: tuple[Any, ...]

    @property
    def slot(self) -> str:
        """The path, joined by dots: ``"exp_avg"``."""
        return ".".join(map(str, self.path))


def parse_name(name: str, params: Collection[str], groups: int | None) -> StateName | None:
    """Parse a name such as ``state.<parameter>.exp_avg`` or ``param_groups.<parameter>.lr``.

    Parameter names have dots too: the longest that matches counts. Further dots lead into nested dicts of the state.

    Args:
        name: The stored name, without the optimizer's key.
        params: Full names of the model's parameters.
        groups: How many groups there are, if they are stored by number; None if they are stored by parameter.

    Returns:
        The parsed name; None for the state or options of a parameter that the model does not have, and for what
        belongs to no parameter.
    """
    kind, _, rest = name.partition(".")
    if kind not in (STATE, GROUPS) or not rest:
        return None if kind == OTHERS else StateName("", None, tuple(name.split(".")))
    if kind == STATE:
        owner = find_name(rest, params)
        slot = "" if owner is None else rest[len(owner) + 1 :]
        return StateName(kind, owner, tuple(slot.split("."))) if slot else None
    if is_group(rest):
        return StateName(kind, rest, ())
    if groups is not None:
        number, _, option = rest.partition(".")
        is_option = number.isdecimal() and int(number) < groups and option
        return StateName(kind, int(number), (option,)) if is_option else None
    owner = find_name(rest, params)
    if owner is None:
        return None
    slot = rest[len(owner) + 1 :]
    return StateName(kind, owner, (slot,) if slot else ())

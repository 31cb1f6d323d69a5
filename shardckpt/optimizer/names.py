"""Which parameter and which state a stored name means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

STATE, GROUPS = "state", "param_groups"


class Place(NamedTuple):
    """Where a stored value belongs.

    Attributes:
        kind: ``"state"``, ``"param_groups"``, or ``""`` for what is neither.
        owner: The parameter's full name, or the number of a group; None for what is neither.
        path: The path below it.
    """

    kind: str
    owner: str | int | None
    path: tuple[Any, ...]

    @property
    def slot(self) -> str:
        """The path as a name."""
        return ".".join(map(str, self.path))


def place_of(name: str, params: Collection[str], groups: int | None) -> Place | None:
    """The place of ``state.<parameter>.exp_avg``, ``param_groups.<parameter>.lr`` and their kind.

    The longest name of a parameter counts. What follows a state's first dot is a dict in the state.

    Args:
        name: The stored name, without the optimizer's own.
        params: Full names of the model's parameters.
        groups: Where groups are stored by number, how many.

    Returns:
        None for the state or options of a parameter that the model does not have.
    """
    kind, _, rest = name.partition(".")
    if kind not in (STATE, GROUPS) or not rest:
        return Place("", None, tuple(name.split(".")))
    if kind == GROUPS and groups is not None:
        number, _, option = rest.partition(".")
        return Place(kind, int(number), (option,)) if number.isdecimal() and int(number) < groups and option else None
    owner = longest(rest, params)
    if owner is None:
        return None
    slot = rest[len(owner) + 1 :]
    if kind == GROUPS:
        return Place(kind, owner, (slot,) if slot else ())
    return Place(kind, owner, tuple(slot.split("."))) if slot else None


def longest(text: str, params: Collection[str]) -> str | None:
    """The longest name that the text is, or begins with before a dot."""
    while text not in params:
        text, dot, _ = text.rpartition(".")
        if not dot:
            return None
    return text


__all__ = ["GROUPS", "STATE", "Place", "longest", "place_of"]

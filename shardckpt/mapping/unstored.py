"""Entries of a sharded state dict that are not stored, or that a checkpoint may lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class LocalNonpersistentObject:
    """A value that is not stored: a save leaves it out, a load returns it as it is."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the wrapped value."""
        return self.obj


class OptionalEntries(dict[str, Any]):
    """Entries of a state dict that a checkpoint may lack: an optimizer's state, one entry per parameter.

    A save stores the entries that exist. A load asks for those of :meth:`complete`: it leaves out an entry of which
    nothing is stored, whatever ``strict`` says, and treats an entry of which a part is stored as any other. Copies and
    pickles are plain dicts.

    Args:
        entries: By name, a nested dict or list of shards.
        prefix: What the keys of all shards begin with; the entry's name and a dot follow.
        make_others: Returns the entries, by name, that a load asks for in addition; called when a load begins.
    """

    def __init__(self, entries: dict[str, Any], prefix: str, make_others: Callable[[], dict[str, Any]] = dict) -> None:
        super().__init__(entries)
        self.prefix = prefix
        self._make_others = make_others

    def complete(self) -> dict[str, Any]:
        """Return the entries that a load asks for: those that exist, and those that are made for it."""
        return {**self._make_others(), **self}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


#: Megatron's name until 0.9.
LocalNonpersitentObject = LocalNonpersistentObject

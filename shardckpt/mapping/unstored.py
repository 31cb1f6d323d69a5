"""Entries of a sharded state dict that are not stored, or that a checkpoint may lack."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import torch

_T = TypeVar("_T")


class LocalNonpersistentObject:
    """A value that is not stored: a save leaves it out, a load returns it as it is."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the wrapped value."""
        return self.obj


class CommonNames(Protocol):
    """The values of the common state, by the keys of objects."""

    def has(self, key: str) -> bool:
        """Return whether the checkpoint has an item for a key."""

    def list_below(self, key: str) -> list[str]:
        """Return the keys of values that begin with a key and a dot."""


class StoredNames(NamedTuple):
    """The stored entries of a checkpoint, by key.

    Attributes:
        tensors: The dtype and global shape of each tensor.
        objects: The sorted keys of objects that are stored whole, or value by value; not of those in several parts.
        resized: The keys of tensors that are loaded into tensors of other shapes.
        in_common: Values of the common state, from which objects that are not stored are built.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    objects: Collection[str]
    resized: Collection[str] = ()
    in_common: CommonNames | None = None

    @classmethod
    def nothing(cls) -> StoredNames:
        """Return the names of an empty checkpoint."""
        return cls({}, ())

    def undo(self, renaming: KeyRenaming) -> StoredNames:
        """Return the entries by their keys before a renaming, without those that have none."""
        common = None if self.in_common is None else _RenamedCommonNames(self.in_common, renaming)
        return StoredNames(
            {old: self.tensors[key] for old, key in renaming.undo_all(self.tensors).items()},
            dict.fromkeys(sorted(renaming.undo_all(self.objects))),
            renaming.undo_all(self.resized),
            common,
        )

    def has(self, key: str) -> bool:
        """Return whether a tensor or an object is stored under a key, or can be built of the common state."""
        return key in self.tensors or key in self.objects or (self.in_common is not None and self.in_common.has(key))

    def list_below(self, key: str, *, in_common: bool = False) -> list[str]:
        """Return the stored keys that begin with a key and a dot; with ``in_common`` also keys of the common state."""
        stored = [each for each in (*self.tensors, *self.objects) if each.startswith(f"{key}.")]
        others = self.in_common.list_below(key) if in_common and self.in_common is not None else []
        return [*stored, *(each for each in others if each not in self.objects)]


class KeyRenaming(NamedTuple):
    """A change of keys: of the given prefixes the first that a key begins with is replaced.

    Attributes:
        prefixes: Old and new prefixes.
    """

    prefixes: Collection[tuple[str, str]]

    def apply(self, key: str) -> str:
        """Return the new key."""
        return next((new + key[len(old) :] for old, new in self.prefixes if key.startswith(old)), key)

    def undo(self, key: str) -> str | None:
        """Return the key whose new key this is; None if there is none."""
        possible = (old + key[len(new) :] for old, new in self.prefixes if key.startswith(new))
        return next((each for each in (*possible, key) if self.apply(each) == key), None)

    def undo_all(self, keys: Collection[str]) -> dict[str, str]:
        """Return the keys that have an old key, by that."""
        return {old: key for key in keys if (old := self.undo(key)) is not None}


class _RenamedCommonNames(NamedTuple):
    """The values of the common state, by the keys before a renaming."""

    names: CommonNames
    renaming: KeyRenaming

    def has(self, key: str) -> bool:
        return self.names.has(self.renaming.apply(key))

    def list_below(self, key: str) -> list[str]:
        return [*self.renaming.undo_all(self.names.list_below(self.renaming.apply(f"{key}.")[:-1]))]


class OptionalEntries(dict[str, Any]):
    """Entries of a state dict that a checkpoint may lack: an optimizer's state, with one entry for each parameter.

    A save stores the entries that exist. A load asks for the entries that ``request`` returns, by default for those
    that exist. It leaves out an entry without stored values, whatever ``strict`` says, unless ``required`` is set.
    Entries whose keys were changed afterwards are asked for as the rest of the state dict. Copies and pickles are plain
    dicts.

    Args:
        entries: By name, a nested dict or list of shards.
        prefix: The prefix of the keys of all shards; the entry's name and a dot follow.
        request: Takes the stored names and these entries, which the caller may have changed. It returns the entries, by
            name, that a load asks the checkpoint for, whether or not they exist here.
        required: Whether an entry that is asked for must be stored, as any other part of a state dict.
        in_common: Whether a save without entries stores an empty dict in the common state, as of any other dict.
    """

    def __init__(
        self,
        entries: dict[str, Any],
        prefix: str,
        request: Callable[[StoredNames, Mapping[str, Any]], dict[str, Any]] | None = None,
        *,
        required: bool = False,
        in_common: bool = False,
    ) -> None:
        super().__init__(entries)
        self.prefix, self.required, self.in_common = prefix, required, in_common
        self._request = request
        self._names = frozenset(entries)

    def request(self, stored: StoredNames) -> dict[str, Any]:
        """Return the entries to ask a checkpoint for, without those that the caller has removed."""
        changed = {name: entry for name, entry in self.items() if self._is_changed(name, entry)}
        if self._request is None or (changed and len(changed) == len(self)):  # all keys got another prefix, say
            return dict(self)
        removed = self._names - self.keys()
        found = {name: entry for name, entry in self._request(stored, self).items() if name not in removed}
        return found | changed

    def rename(self, renaming: KeyRenaming) -> None:
        """Ask for the entries under other keys from now on; the shards of the entries have these already."""
        request, self.prefix = self._request, renaming.apply(self.prefix)
        if request is None:
            return

        def request_renamed(stored: StoredNames, entries: Mapping[str, Any]) -> dict[str, Any]:
            before = _change_keys(dict(entries), lambda key: renaming.undo(key) or key)
            return _change_keys(request(stored.undo(renaming), before), renaming.apply)

        self._request = request_renamed

    def without(self, names: Collection[str]) -> OptionalEntries:
        """Return these entries without some, which a load then does not ask for."""
        rest = {name: entry for name, entry in self.items() if name not in names}
        kept = OptionalEntries(rest, self.prefix, self._request, required=self.required, in_common=self.in_common)
        kept._names = self._names
        return kept

    def _is_changed(self, name: str, entry: Any) -> bool:
        """Return whether an entry has a key that does not begin with its prefix and name: the caller has changed it."""
        if isinstance(entry, (dict, list)):
            return any(self._is_changed(name, each) for each in (entry.values() if isinstance(entry, dict) else entry))
        key = getattr(entry, "key", None)
        return isinstance(key, str) and not f"{key}.".startswith(f"{self.prefix}{name}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _change_keys(values: _T, change: Callable[[str], str]) -> _T:
    """Return nested entries with copies of their shards, which have other keys."""
    if isinstance(values, (dict, list)):
        changed = copy.copy(values)
        for name, each in values.items() if isinstance(values, dict) else enumerate(values):
            changed[name] = _change_keys(each, change)
        return changed
    if not isinstance(getattr(values, "key", None), str):
        return values
    shard: Any = copy.copy(values)
    shard.key = change(shard.key)
    return shard  # type: ignore[no-any-return]


#: Megatron's name until 0.9.
LocalNonpersitentObject = LocalNonpersistentObject

"""Load templates: the structure of the state dict to load, its shards in a list, and how loaded values fill it."""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException
from shardckpt.mapping import (
    FactoryMergeFn,
    LocalNonpersistentObject,
    OptionalEntries,
    ShardedBase,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
)
from shardckpt.state_dict import build_copy, dict_list_map_outplace, nested_values, of_type

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: Stands for a value that the checkpoint does not have: the result has no entry for it.
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "MISSING"})()


@dataclass(frozen=True)
class _Slot:
    """A leaf that the load fills: the index of a shard in the template's list."""

    index: int


@dataclass(frozen=True)
class _FactorySlot:
    """A leaf that a factory fills from its shards: a nested dict or list of slots, and what merges their values."""

    slots: Any
    merge_fn: FactoryMergeFn


@dataclass(frozen=True)
class _Kept:
    """A leaf whose value is known, not looked up in the common state: the caller's own, or a loaded one."""

    value: Any


class _OptionalEntry(NamedTuple):
    """An entry that the checkpoint may lack: the prefix of its keys, and the indices of its shards."""

    prefix: str
    numbers: range


class LoadTemplate:
    """The structure of the state dict to load; the caller's dict and descriptions are not changed.

    Args:
        wanted: The caller's sharded state dict.

    Attributes:
        shards: Copies of the descriptions of all shards, factories' included, in the order of the leaves.
    """

    def __init__(self, wanted: ShardedStateDict) -> None:
        self.shards: list[ShardedBase] = []
        self._optional: list[_OptionalEntry] = []
        self._tree = self._make_slots(wanted)

    def absent(self, stored: Collection[str], key_of: Callable[[ShardedBase], str]) -> dict[int, str]:
        """Return the shards of optional entries of which the checkpoint has nothing.

        Args:
            stored: The names of all that is stored.
            key_of: Returns the name under which a shard is stored.

        Returns:
            The name of the entry, by the index of the shard in :attr:`shards`.
        """
        found: dict[int, str] = {}
        if all(key_of(self.shards[number]) in stored for entry in self._optional for number in entry.numbers):
            return found
        ordered = sorted(stored)
        for prefix, numbers in self._optional:
            position = bisect_left(ordered, prefix)
            if position == len(ordered) or not ordered[position].startswith(prefix):
                found.update(dict.fromkeys(numbers, prefix.removesuffix(".")))
        return found

    @property
    def optional(self) -> int:
        """The number of shards of optional entries."""
        return sum(len(entry.numbers) for entry in self._optional)

    def fill(self, values: list[Any], common: StateDict) -> StateDict:
        """Return the state dict, filled with loaded values and the common state.

        Args:
            values: The loaded value of every shard in :attr:`shards`, in order, or ``MISSING``.
            common: The checkpoint's common state, which has the values of all other leaves. It is not changed.

        Raises:
            CheckpointingException: the common state has a value where the template has a shard, or a list of another
                length.
        """
        filled = _assemble(dict_list_map_outplace(lambda leaf: _fill_slot(leaf, values), self._tree), common, "")
        return filled if isinstance(filled, dict) else {}

    def _make_slots(self, wanted: Any) -> Any:
        """Return the structure with slots as leaves, and append the shards to the list."""
        if isinstance(wanted, OptionalEntries):
            return {
                name: self._make_entry(f"{wanted.prefix}{name}.", value) for name, value in wanted.complete().items()
            }
        if isinstance(wanted, dict):
            return of_type(wanted, {key: self._make_slots(value) for key, value in wanted.items()})
        if isinstance(wanted, list):
            return of_type(wanted, [self._make_slots(value) for value in wanted])
        return self._make_slot(wanted)

    def _make_entry(self, prefix: str, wanted: Any) -> Any:
        first = len(self.shards)
        slots = self._make_slots(wanted)
        # keys that a prefix was added to afterwards do not show by name whether the checkpoint has the entry
        if all(shard.key.startswith(prefix) for shard in self.shards[first:]):
            self._optional.append(_OptionalEntry(prefix, range(first, len(self.shards))))
        return slots

    def _make_slot(self, leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            return _FactorySlot(dict_list_map_outplace(self._make_slot, build_copy(leaf)), leaf.merge_fn)
        if isinstance(leaf, ShardedBase):
            self.shards.append(build_copy(leaf))
            return _Slot(len(self.shards) - 1)
        return _Kept(leaf.unwrap()) if isinstance(leaf, LocalNonpersistentObject) else leaf


def _fill_slot(leaf: Any, values: list[Any]) -> Any:
    """Return the loaded value of a slot, as a :class:`_Kept`; other leaves as they are."""
    if isinstance(leaf, _Slot):
        return _Kept(values[leaf.index])
    if isinstance(leaf, _FactorySlot):
        parts = dict_list_map_outplace(lambda inner: _unwrap(_fill_slot(inner, values)), leaf.slots)
        return _Kept(MISSING if any(value is MISSING for value in nested_values(parts)) else leaf.merge_fn(parts))
    return leaf


def _unwrap(leaf: Any) -> Any:
    """Return what merge_fn gets for a leaf: the loaded value, or a plain leaf as build_fn made it."""
    return leaf.value if isinstance(leaf, _Kept) else leaf


def _assemble(wanted: Any, common: Any, path: str) -> Any:
    """Return ``wanted`` with its kept values, and for all other leaves the common state at the same path."""
    if isinstance(wanted, _Kept):
        if common is not MISSING:
            raise CheckpointingException(
                f"the checkpoint's common state has a value at {path or 'the top level'}, where the state dict to "
                "load has a sharded or local one: describe it as it was saved"
            )
        return wanted.value
    if isinstance(wanted, dict) and (common is MISSING or isinstance(common, dict)):
        return _assemble_dict(wanted, common, path)
    if isinstance(wanted, list) and (common is MISSING or isinstance(common, list)):
        return _assemble_list(wanted, common, path)
    if any(isinstance(leaf, _Kept) for leaf in nested_values(wanted)):
        raise CheckpointingException(
            f"the checkpoint's common state has a {type(common).__name__} at {path or 'the top level'}, where the "
            f"state dict to load has a {type(wanted).__name__} with shards"
        )
    return common


def _assemble_dict(wanted: dict[Any, Any], common: Any, path: str) -> Any:
    stored: dict[Any, Any] = {} if common is MISSING else common
    result = copy.copy(stored)
    for key, value in wanted.items():
        part = _assemble(value, stored.get(key, MISSING), f"{path}[{key!r}]")
        if part is not MISSING:
            result[key] = part
    return result if result or not wanted else MISSING


def _assemble_list(wanted: list[Any], common: Any, path: str) -> Any:
    stored: list[Any] = [] if common is MISSING else common
    # a save leaves sharded values out of a list, so the stored values are those of the others, in order
    positions = [index for index, value in enumerate(wanted) if _has_common(value)]
    if len(stored) == len(wanted):
        positions = list(range(len(wanted)))  # every value left something in the common state
    if common is not MISSING and len(stored) != len(positions):
        if len(positions) == len(wanted):
            return common  # nothing in it is sharded: the stored list is the result, whatever its length
        raise CheckpointingException(
            f"the checkpoint's common state has a list of {len(stored)} values at {path}, the state dict to load has "
            f"{len(positions)} that are not sharded"
        )
    by_position = dict(zip(positions, stored, strict=False))
    parts = [_assemble(value, by_position.get(i, MISSING), f"{path}[{i}]") for i, value in enumerate(wanted)]
    result = [part for part in parts if part is not MISSING]
    return result if result or not wanted else MISSING


def _has_common(wanted: Any) -> bool:
    """Return whether a save of this value puts any of it in the common state."""
    if isinstance(wanted, dict):
        return not wanted or any(_has_common(value) for value in wanted.values())
    if isinstance(wanted, list):
        return not wanted or any(_has_common(value) for value in wanted)
    return not isinstance(wanted, _Kept)


__all__ = ["MISSING", "LoadTemplate"]

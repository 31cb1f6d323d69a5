"""The form of a wanted state dict: taken apart before a load, and put together again with what was loaded."""

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

#: Stands for a value that the checkpoint does not have: its place is left out of the result.
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "MISSING"})()


@dataclass(frozen=True)
class _Slot:
    """A place that the load fills: the number of a shard."""

    index: int


@dataclass(frozen=True)
class _FactorySlot:
    """A place that a factory fills from its shards."""

    nest: Any
    merge_fn: FactoryMergeFn


@dataclass(frozen=True)
class _Kept:
    """A place that keeps the caller's own value."""

    value: Any


class _OptionalEntry(NamedTuple):
    """An entry that the checkpoint may lack: what its keys begin with, and the numbers of its shards."""

    prefix: str
    numbers: range


class LoadTemplate:
    """A wanted state dict, its shards listed flat; the caller's nest and descriptions stay as they are."""

    def __init__(self, wanted: ShardedStateDict) -> None:
        self.shards: list[ShardedBase] = []
        self._optional: list[_OptionalEntry] = []
        self._tree = self._slots(wanted)

    def absent(self, stored: Collection[str], key_of: Callable[[ShardedBase], str]) -> dict[int, str]:
        """The shards of optional entries of which the checkpoint has nothing: their numbers, with the entry's name.

        Args:
            stored: The names of what is stored.
            key_of: The name under which a shard is stored.
        """
        found: dict[int, str] = {}
        if all(key_of(self.shards[number]) in stored for entry in self._optional for number in entry.numbers):
            return found
        ordered = sorted(stored)
        for prefix, numbers in self._optional:
            place = bisect_left(ordered, prefix)
            if place == len(ordered) or not ordered[place].startswith(prefix):
                found.update(dict.fromkeys(numbers, prefix.removesuffix(".")))
        return found

    @property
    def optional(self) -> int:
        """The number of shards of optional entries."""
        return sum(len(entry.numbers) for entry in self._optional)

    def fill(self, values: list[Any], common: StateDict) -> StateDict:
        """The state dict of the wanted form.

        Args:
            values: The loaded value of every shard in :attr:`shards`, or ``MISSING``.
            common: The checkpoint's common state; it answers for every other leaf.

        Raises:
            CheckpointingException: the common state has a value where a shard is wanted, or lists that do not fit.
        """
        filled = _assemble(dict_list_map_outplace(lambda leaf: _filled(leaf, values), self._tree), common, "")
        return filled if isinstance(filled, dict) else {}

    def _slots(self, wanted: Any) -> Any:
        """The nest with slots in the places of its leaves."""
        if isinstance(wanted, OptionalEntries):
            return {name: self._entry(f"{wanted.prefix}{name}.", value) for name, value in wanted.complete().items()}
        if isinstance(wanted, dict):
            return of_type(wanted, {key: self._slots(value) for key, value in wanted.items()})
        if isinstance(wanted, list):
            return of_type(wanted, [self._slots(value) for value in wanted])
        return self._slot(wanted)

    def _entry(self, prefix: str, wanted: Any) -> Any:
        first = len(self.shards)
        slots = self._slots(wanted)
        if all(shard.key.startswith(prefix) for shard in self.shards[first:]):  # else its keys were changed since
            self._optional.append(_OptionalEntry(prefix, range(first, len(self.shards))))
        return slots

    def _slot(self, leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            return _FactorySlot(dict_list_map_outplace(self._slot, build_copy(leaf)), leaf.merge_fn)
        if isinstance(leaf, ShardedBase):
            self.shards.append(build_copy(leaf))
            return _Slot(len(self.shards) - 1)
        return _Kept(leaf.unwrap()) if isinstance(leaf, LocalNonpersistentObject) else leaf


def _filled(leaf: Any, values: list[Any]) -> Any:
    """A slot turned into the value that it keeps; other leaves as they are."""
    if isinstance(leaf, _Slot):
        return _Kept(values[leaf.index])
    if isinstance(leaf, _FactorySlot):
        nest = dict_list_map_outplace(lambda inner: _value(_filled(inner, values)), leaf.nest)
        return _Kept(MISSING if any(value is MISSING for value in nested_values(nest)) else leaf.merge_fn(nest))
    return leaf


def _value(leaf: Any) -> Any:
    """What a filled leaf of a factory's nest hands to its merge_fn; plain leaves are handed over as they were built."""
    return leaf.value if isinstance(leaf, _Kept) else leaf


def _assemble(wanted: Any, common: Any, path: str) -> Any:
    """Merge the kept values of ``wanted`` with the common state below the same path."""
    if isinstance(wanted, _Kept):
        if common is not MISSING:
            raise CheckpointingException(
                f"the checkpoint's common state has a value at {path or 'the top level'}, where the wanted state "
                "dict has a sharded or local one: describe that place as it was saved"
            )
        return wanted.value
    if isinstance(wanted, dict) and (common is MISSING or isinstance(common, dict)):
        return _assemble_dict(wanted, common, path)
    if isinstance(wanted, list) and (common is MISSING or isinstance(common, list)):
        return _assemble_list(wanted, common, path)
    if any(isinstance(leaf, _Kept) for leaf in nested_values(wanted)):
        raise CheckpointingException(
            f"the checkpoint's common state has a {type(common).__name__} at {path or 'the top level'}, where the "
            f"wanted state dict has a {type(wanted).__name__} with shards"
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
    places = [index for index, value in enumerate(wanted) if _has_common(value)]
    if len(stored) == len(wanted):
        places = list(range(len(wanted)))  # every value left something in the common state
    if common is not MISSING and len(stored) != len(places):
        if len(places) == len(wanted):
            return common  # nothing sharded in it: the stored list is the answer, whatever its length
        raise CheckpointingException(
            f"the checkpoint's common state has a list of {len(stored)} values at {path}, the wanted state dict has "
            f"{len(places)} that are not sharded"
        )
    by_place = dict(zip(places, stored, strict=False))
    parts = [_assemble(value, by_place.get(i, MISSING), f"{path}[{i}]") for i, value in enumerate(wanted)]
    result = [part for part in parts if part is not MISSING]
    return result if result or not wanted else MISSING


def _has_common(wanted: Any) -> bool:
    """Whether a save of this nest leaves something of it in the common state."""
    if isinstance(wanted, dict):
        return not wanted or any(_has_common(value) for value in wanted.values())
    if isinstance(wanted, list):
        return not wanted or any(_has_common(value) for value in wanted)
    return not isinstance(wanted, _Kept)


__all__ = ["MISSING", "LoadTemplate"]

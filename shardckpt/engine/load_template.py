"""Load templates: the structure of the state dict to load, its shards in a list, and how loaded values fill it."""

from __future__ import annotations

import copy
import os
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CheckpointingException, show_given
from shardckpt.mapping.base import FactoryMergeFn, ShardedBase, ShardedStateDict, StateDict
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import PlainObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject, OptionalEntries, StoredNames
from shardckpt.state_dict import (
    build_copy,
    dict_list_map_outplace,
    format_path,
    holds_tensors,
    is_part,
    nested_items,
    nested_values,
    of_type,
    refuse_parts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

#: Stands for a value that the checkpoint does not have: the result has no entry for it.
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "MISSING"})()


class _Slot(NamedTuple):
    """A leaf whose value is not in the common state.

    Attributes:
        compute: Returns the leaf's value, or ``MISSING``, given the loaded values of all shards of the template.
        shard: Index in :attr:`LoadTemplate.shards` of the leaf's shard; None for a factory, a PlainObject or a local
            value.
    """

    compute: Callable[[list[Any]], Any]
    shard: int | None = None


class LoadTemplate:
    """The structure of the state dict to load; the caller's dict and descriptions are not changed.

    A leaf that is one rank's part of a tensor, such as a DTensor, and is not described as a shard is a ShardingError.

    Args:
        wanted: The state dict to load.
        list_stored: Returns the names that the checkpoint stores: optional entries without stored values are not
            loaded. It is called once, and only if there are optional entries. By default nothing is stored.

    Attributes:
        shards: Copies of the descriptions of all shards, factories' included, in the order of the leaves.
        left_out: The names of optional entries without stored values.
    """

    def __init__(self, wanted: ShardedStateDict, list_stored: Callable[[], StoredNames] = StoredNames.nothing) -> None:
        self.shards: list[ShardedBase] = []
        self.left_out: list[str] = []
        self._list_stored = list_stored
        self._has_stored_entries = False
        self._has_unstored_entries = False
        self._may_have_parts = False
        self._has_tensors = False
        if isinstance(wanted, str | int | float | os.PathLike | None):
            raise CheckpointingException(
                f"the state dict to load is {show_given(wanted)}: expected a dict, as "
                "shardckpt.adapters.to_sharded_state_dict(model, optimizer) returns it, first, and then the path"
            )
        self._tree = self._make_slots(wanted)
        for path, leaf in nested_items(self._tree) if self._may_have_parts else ():
            refuse_parts(leaf, path)

    @property
    def drops_all(self) -> bool:
        """Whether the caller has optional entries with shards, and none of them is stored."""
        return self._has_unstored_entries and not self._has_stored_entries

    def fill(
        self, values: list[Any], common: StateDict, *, built: Collection[int] = (), only_built: bool = False
    ) -> StateDict:
        """Return the state dict, filled with loaded values and the common state, which is not changed.

        A value in the common state where the template has a shard is an error, and so is a list of another length
        where the template's has shards in it.

        Args:
            values: The loaded value of every shard in :attr:`shards`, in order, or ``MISSING``.
            common: The values of all other leaves.
            built: Indices of shards whose objects the strategy built from single values, as plain DCP stores them. The
                common state has those values, too; if there are any, they are dropped from it where the template has
                a shard.
            only_built: Whether values are dropped at the ``built`` shards alone; a value at any other shard is then an
                error.
        """
        if built:
            common = _drop_stored_twice(self._tree, common, built, "", built if only_built else None)
        filled = _assemble(self._tree, values, common, "")
        return filled if isinstance(filled, dict) else {}

    def find_ignored_tensors(self, common: StateDict) -> list[str]:
        """Return the paths of wanted tensors that are neither described by a shard nor in the common state."""
        pairs = _pair_tensors(self._tree, common, ()) if self._has_tensors else ()
        return [format_path(path) for path, _, stored in pairs if stored is MISSING]

    def find_misshapen(self, common: StateDict) -> list[str]:
        """Return paths and shapes of wanted tensors that the common state has in other shapes."""
        pairs = _pair_tensors(self._tree, common, ()) if self._has_tensors else ()
        return [
            f"{format_path(path)} {tuple(stored.shape)} for {tuple(wanted.shape)}"
            for path, wanted, stored in pairs
            if isinstance(stored, torch.Tensor) and stored.shape != wanted.shape
        ]

    def _make_slots(self, wanted: Any) -> Any:
        """Return the structure with a slot for each leaf that the common state does not have; list its shards."""
        slots: Any = wanted
        match wanted:
            case ShardedTensor():  # most leaves
                slots = self._add_shard(wanted)
            case OptionalEntries():
                slots = self._make_optional_slots(wanted)
            case dict():
                slots = of_type(wanted, {key: self._make_slots(value) for key, value in wanted.items()})
            case list():
                slots = of_type(wanted, [self._make_slots(value) for value in wanted])
            case ShardedTensorFactory():
                slots = _Slot(partial(_merge, self._make_slots(build_copy(wanted)), wanted.merge_fn))
            case PlainObject():  # stored for the readers of other libraries alone
                slots = _Slot(lambda _: MISSING)
            case ShardedBase():
                slots = self._add_shard(wanted)
            case LocalNonpersistentObject():
                slots = _Slot(lambda _: wanted.unwrap())
            case _:
                # tuples and sets may have shards in them, which nothing would fill
                self._may_have_parts |= isinstance(wanted, (tuple, set, frozenset))
                self._may_have_parts |= is_part(wanted) or holds_tensors(wanted)
                self._has_tensors |= isinstance(wanted, torch.Tensor)
        return slots

    def _add_shard(self, shard: ShardedBase) -> _Slot:
        self.shards.append(build_copy(shard))
        number = len(self.shards) - 1
        return _Slot(itemgetter(number), number)

    def _make_optional_slots(self, wanted: OptionalEntries) -> dict[str, Any]:
        """Return the slots of the entries that have stored values, or must have them; name the others as left out."""
        slots: dict[str, Any] = {}
        for name, entry in wanted.request(self._stored).items():
            first, full_name = len(self.shards), f"{wanted.prefix}{name}"
            entry_slots = self._make_slots(entry)  # appends the entry's shards
            keys = [shard.key for shard in self.shards[first:]]
            # an entry whose keys were renamed must be stored: see OptionalEntries
            is_renamed = not all(f"{key}.".startswith(f"{full_name}.") for key in keys)
            is_optional = not (wanted.required or is_renamed)
            has_local_values = entry_slots and not keys
            if is_optional and not has_local_values and not any(map(self._stored.has, keys)):
                del self.shards[first:]
                self.left_out.append(full_name)
                self._has_unstored_entries |= len(keys) > 0
            else:
                slots[name] = entry_slots
                self._has_stored_entries |= is_optional and len(keys) > 0
        return slots

    @cached_property
    def _stored(self) -> StoredNames:
        return self._list_stored()


def _pair_tensors(
    wanted: Any, common: Any, path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor, Any]]:
    """Yield the path of each wanted tensor, the tensor, and the value of the common state at that path or MISSING.

    Tensors in a list that the common state has, too, are left out: the items of a stored list have other places.
    """
    if isinstance(wanted, dict) and (common is MISSING or isinstance(common, dict)):
        for key, value in wanted.items():
            yield from _pair_tensors(value, MISSING if common is MISSING else common.get(key, MISSING), (*path, key))
    elif isinstance(wanted, list) and common is MISSING:
        for index, value in enumerate(wanted):
            yield from _pair_tensors(value, MISSING, (*path, index))
    elif isinstance(wanted, torch.Tensor):
        yield path, wanted, common


def _merge(parts: Any, merge_fn: FactoryMergeFn, values: list[Any]) -> Any:
    """Return a factory's value: merge_fn gets its loaded shards, and the plain leaves that build_fn made."""
    filled = dict_list_map_outplace(lambda leaf: leaf.compute(values) if isinstance(leaf, _Slot) else leaf, parts)
    return MISSING if any(value is MISSING for value in nested_values(filled)) else merge_fn(filled)


def _drop_stored_twice(
    wanted: Any, common: Any, built: Collection[int], path: str, dropped: Collection[int] | None = None
) -> Any:
    """Return the common state without its values at the slots of ``wanted``; MISSING if nothing is left.

    Args:
        wanted: The structure, or a part of it.
        common: The common state at its place.
        built: Indices of the shards whose values were built: a stored list has the values of these, too.
        path: The place, for errors.
        dropped: Indices of the shards at whose slots values are dropped; None: at all slots.
    """
    if not _has_slot(wanted, dropped):
        return common
    if isinstance(wanted, dict) and isinstance(common, dict):
        kept = {
            key: _drop_stored_twice(wanted[key], value, built, f"{path}[{key!r}]", dropped) if key in wanted else value
            for key, value in common.items()
        }
        return {key: value for key, value in kept.items() if value is not MISSING}
    if isinstance(wanted, list) and isinstance(common, list):
        return _drop_from_list(wanted, common, built, path, dropped)
    return MISSING


def _drop_from_list(
    wanted: list[Any], common: list[Any], built: Collection[int], path: str, dropped: Collection[int] | None
) -> Any:
    """Do for a list what :func:`_drop_stored_twice` does; the list keeps its values for unsharded items, in order."""
    # the stored list has the values of built and of unsharded items, in order; tensors are not in it
    positions = [i for i, value in enumerate(wanted) if _has_common(value) or _has_slot(value, built)]
    if len(common) == len(wanted):
        positions = list(range(len(wanted)))
    if len(common) != len(positions):
        raise CheckpointingException(
            f"the checkpoint's common state has a list of {len(common)} values at {path}, the state dict to load has "
            f"{len(positions)} that are not tensors"
        )
    kept = []
    for position, value in zip(positions, common, strict=True):
        # _assemble_list expects no value for an item that has slots alone
        if _has_common(wanted[position]):
            part = _drop_stored_twice(wanted[position], value, built, f"{path}[{position}]", dropped)
            kept.append(value if part is MISSING else part)
    return kept or MISSING


def _has_slot(wanted: Any, shards: Collection[int] | None = None) -> bool:
    """Return whether a structure has a slot; if ``shards`` are given, whether it has a slot of one of these."""
    slots = (leaf for leaf in nested_values(wanted) if isinstance(leaf, _Slot))
    return any(shards is None or slot.shard in shards for slot in slots)


def _assemble(wanted: Any, values: list[Any], common: Any, path: str) -> Any:
    """Return ``wanted`` with the values of its slots, and for all other leaves the common state at the same path."""
    if isinstance(wanted, _Slot):
        if common is not MISSING:
            raise CheckpointingException(
                f"the checkpoint's common state has a value at {path or 'the top level'}, where the state dict to "
                "load has a sharded or local one: describe it as it was saved"
            )
        return wanted.compute(values)
    if isinstance(wanted, dict) and (common is MISSING or isinstance(common, dict)):
        return _assemble_dict(wanted, values, common, path)
    if isinstance(wanted, list) and (common is MISSING or isinstance(common, list)):
        return _assemble_list(wanted, values, common, path)
    if _has_slot(wanted):
        raise CheckpointingException(
            f"the checkpoint's common state has a {type(common).__name__} at {path or 'the top level'}, where the "
            f"state dict to load has a {type(wanted).__name__} with shards"
        )
    return common


def _assemble_dict(wanted: dict[Any, Any], values: list[Any], common: Any, path: str) -> Any:
    stored: dict[Any, Any] = {} if common is MISSING else common
    result = copy.copy(stored)
    for key, value in wanted.items():
        if type(value) is _Slot and key not in stored:  # the usual case, which needs no path
            part = value.compute(values)
        else:
            part = _assemble(value, values, stored.get(key, MISSING), f"{path}[{key!r}]")
        if part is not MISSING:
            result[key] = part
    return result if result or not wanted else MISSING


def _assemble_list(wanted: list[Any], values: list[Any], common: Any, path: str) -> Any:
    stored: list[Any] = [] if common is MISSING else common
    # a save leaves sharded items out of a list: the stored list has the others, in order
    positions = [index for index, value in enumerate(wanted) if _has_common(value)]
    if len(stored) == len(wanted):  # each item has a stored value: _assemble refuses one in the place of a shard
        positions = list(range(len(wanted)))
    if common is not MISSING and len(stored) != len(positions):
        if not _has_slot(wanted):
            return common  # nothing in it is sharded: the stored list is the result, whatever its length
        raise CheckpointingException(
            f"the checkpoint's common state has a list of {len(stored)} values at {path}, the state dict to load has "
            f"{len(positions)} that are not sharded, or not in whole"
        )
    by_position = dict(zip(positions, stored, strict=False))
    parts = [_assemble(value, values, by_position.get(i, MISSING), f"{path}[{i}]") for i, value in enumerate(wanted)]
    result = [part for part in parts if part is not MISSING]
    return result if result or not wanted else MISSING


def _has_common(wanted: Any) -> bool:
    """Return whether a save of this value puts any of it in the common state."""
    if isinstance(wanted, (dict, list)):
        inner = wanted.values() if isinstance(wanted, dict) else wanted
        return not wanted or any(map(_has_common, inner))
    return not isinstance(wanted, _Slot)

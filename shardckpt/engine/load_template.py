"""Load templates: flatten the state dict to load into a list of shards, and put the loaded values back in place."""

from __future__ import annotations

import copy
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
    CONTAINERS,
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


class _Placeholder(NamedTuple):
    """Stands in a template's tree for a leaf whose value is not in the common state.

    Attributes:
        compute: Returns the leaf's value, or ``MISSING``, given the loaded values of all shards of the template.
        shard: Index in :attr:`LoadTemplate.shards` of the leaf's shard; None for a factory, a PlainObject or a local
            value.
    """

    compute: Callable[[list[Any]], Any]
    shard: int | None = None


class LoadTemplate:
    """The structure of the state dict to load. The caller's dict and descriptions are not changed.

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
        if not isinstance(wanted, dict):
            raise CheckpointingException(
                f"the state dict to load is {show_given(wanted)}: expected a dict, as "
                "shardckpt.adapters.to_sharded_state_dict(model, optimizer) returns it, first, and then the path"
            )
        self._tree = self._make_tree(wanted)
        for path, leaf in nested_items(self._tree) if self._may_have_parts else ():
            refuse_parts(leaf, path)

    @property
    def lacks_all_optional(self) -> bool:
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
            built: Indices of shards whose objects were built from entries of the common state, as plain DCP stores
                them. If there are any, a shard replaces the value that the common state has in its place.
            only_built: Whether only the ``built`` shards replace values; a value at any other shard is an error.
        """
        filler = _Filler(values, built, any_replaces=bool(built) and not only_built)
        filled = filler.fill(self._tree, common, "")
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

    def _make_tree(self, wanted: Any) -> Any:
        """Return ``wanted`` with a placeholder for each leaf that a common state lacks; append to :attr:`shards`."""
        tree: Any = wanted
        match wanted:
            case ShardedTensor():  # most leaves
                tree = self._add_shard(wanted)
            case OptionalEntries():
                tree = self._make_optional_tree(wanted)
            case dict():
                tree = of_type(wanted, {key: self._make_tree(value) for key, value in wanted.items()})
            case list():
                tree = of_type(wanted, [self._make_tree(value) for value in wanted])
            case ShardedTensorFactory():
                tree = _Placeholder(partial(_merge, self._make_tree(build_copy(wanted)), wanted.merge_fn))
            case PlainObject():  # stored for the readers of other libraries alone
                tree = _Placeholder(lambda _: MISSING)
            case ShardedBase():
                tree = self._add_shard(wanted)
            case LocalNonpersistentObject():
                tree = _Placeholder(lambda _: wanted.unwrap())
            case _:
                # these may have shards in them, which nothing would fill
                self._may_have_parts |= isinstance(wanted, CONTAINERS)
                self._may_have_parts |= is_part(wanted) or holds_tensors(wanted)
                self._has_tensors |= isinstance(wanted, torch.Tensor)
        return tree

    def _add_shard(self, shard: ShardedBase) -> _Placeholder:
        self.shards.append(build_copy(shard))
        index = len(self.shards) - 1
        return _Placeholder(itemgetter(index), index)

    def _make_optional_tree(self, wanted: OptionalEntries) -> dict[str, Any]:
        """Return the trees of the entries that have stored values, or must have them; name the others as left out."""
        tree: dict[str, Any] = {}
        for name, entry in wanted.request(self._stored).items():
            first, full_name = len(self.shards), f"{wanted.prefix}{name}"
            entry_tree = self._make_tree(entry)  # appends the entry's shards
            keys = [shard.key for shard in self.shards[first:]]
            # an entry whose keys were renamed must be stored: see OptionalEntries
            is_renamed = not all(f"{key}.".startswith(f"{full_name}.") for key in keys)
            is_optional = not (wanted.required or is_renamed)
            is_empty = isinstance(entry_tree, (dict, list)) and not entry_tree
            has_local_values = not keys and not is_empty
            if is_optional and not has_local_values and not any(map(self._stored.has, keys)):
                del self.shards[first:]
                self.left_out.append(full_name)
                self._has_unstored_entries |= len(keys) > 0
            else:
                tree[name] = entry_tree
                self._has_stored_entries |= is_optional and len(keys) > 0
        return tree

    @cached_property
    def _stored(self) -> StoredNames:
        return self._list_stored()


def _pair_tensors(
    wanted: Any, common: Any, path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor, Any]]:
    """Yield the path of each wanted tensor, the tensor, and the value of the common state at that path or MISSING.

    Tensors in a list that the common state has, too, are left out: a stored list lacks shards, so its indices differ.
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
    filled = dict_list_map_outplace(
        lambda part: part.compute(values) if isinstance(part, _Placeholder) else part, parts
    )
    return MISSING if any(value is MISSING for value in nested_values(filled)) else merge_fn(filled)


class _Filler(NamedTuple):
    """Fills a template's tree in one walk over the tree and the common state.

    Attributes:
        values: The loaded value of every shard.
        built: Indices of the shards that were built from the common state, and replace their values there.
        any_replaces: Whether every other placeholder replaces its value there, too.
    """

    values: list[Any]
    built: Collection[int]
    any_replaces: bool

    def fill(self, wanted: Any, common: Any, path: str) -> Any:
        """Return ``wanted`` with the loaded values, and for all other leaves the common state at the same path."""
        if isinstance(wanted, _Placeholder):
            if common is not MISSING and not self._replaces(wanted):
                raise CheckpointingException(
                    f"the checkpoint's common state has a value at {path or 'the top level'}, where the state dict to "
                    "load has a sharded or local one: describe it as it was saved"
                )
            return wanted.compute(self.values)
        container = next((kind for kind in (dict, list) if isinstance(wanted, kind)), None)
        if container is None:
            return common
        if common is not MISSING and not isinstance(common, container):
            if not _has_placeholder(wanted):
                return common
            if not self._replaces(wanted):
                raise CheckpointingException(
                    f"the checkpoint's common state has a {type(common).__name__} at {path or 'the top level'}, where "
                    f"the state dict to load has a {type(wanted).__name__} with shards"
                )
            common = MISSING
        return self._fill_dict(wanted, common, path) if container is dict else self._fill_list(wanted, common, path)

    def _fill_dict(self, wanted: dict[Any, Any], common: Any, path: str) -> Any:
        stored: dict[Any, Any] = {} if common is MISSING else common
        result = copy.copy(stored)
        for key, value in wanted.items():
            if type(value) is _Placeholder and key not in stored:  # the usual case, which needs no path
                part = value.compute(self.values)
            else:
                part = self.fill(value, stored.get(key, MISSING), f"{path}[{key!r}]")
            if part is MISSING:
                result.pop(key, None)
            else:
                result[key] = part
        return result if result or not wanted or common is not MISSING else MISSING

    def _fill_list(self, wanted: list[Any], common: Any, path: str) -> Any:
        stored: list[Any] = [] if common is MISSING else common
        # a save leaves shards out of a list, and plain DCP tensors: the stored list has the other items, in order
        positions = [i for i, value in enumerate(wanted) if _has_common(value) or _has_placeholder(value, self.built)]
        if len(stored) == len(wanted):  # each item has a stored value: fill() refuses one in the place of a shard
            positions = list(range(len(wanted)))
        if common is not MISSING and len(stored) != len(positions):
            if not _has_placeholder(wanted):
                return common  # nothing in it is sharded: the stored list is the result, whatever its length
            raise CheckpointingException(
                f"the checkpoint's common state has a list of {len(stored)} values at {path}, the state dict to load "
                f"has {len(positions)} there that a common state has, in whole or in part"
            )
        by_position = dict(zip(positions, stored, strict=False))
        parts = [self.fill(value, by_position.get(i, MISSING), f"{path}[{i}]") for i, value in enumerate(wanted)]
        result = [part for part in parts if part is not MISSING]
        return result if result or not wanted or common is not MISSING else MISSING

    def _replaces(self, wanted: Any) -> bool:
        """Return whether ``wanted`` takes nothing from the common state but what its shards were built from."""
        return not _has_common(wanted) and all(
            self.any_replaces or leaf.shard in self.built for leaf in nested_values(wanted)
        )


def _has_placeholder(wanted: Any, shards: Collection[int] | None = None) -> bool:
    """Return whether a tree has a placeholder; if ``shards`` are given, one of these."""
    placeholders = (leaf for leaf in nested_values(wanted) if isinstance(leaf, _Placeholder))
    return any(shards is None or leaf.shard in shards for leaf in placeholders)


def _has_common(wanted: Any) -> bool:
    """Return whether a save of this value puts any of it in the common state."""
    if isinstance(wanted, (dict, list)):
        inner = wanted.values() if isinstance(wanted, dict) else wanted
        return not wanted or any(map(_has_common, inner))
    return not isinstance(wanted, _Placeholder)

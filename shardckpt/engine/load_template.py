"""Load templates: list the shards of the state dict to load, and put the loaded values in their places."""

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
    build_copy,
    dict_list_map_outplace,
    format_path,
    may_have_parts,
    nested_items,
    nested_values,
    of_type,
    refuse_parts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

#: Stands for a value that the checkpoint does not have: the result has no entry for it.
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "MISSING"})()


class _Placeholder(NamedTuple):
    """Stands in a template's tree for a leaf that a save does not put in the common state.

    Attributes:
        compute: Takes the loaded values of all shards of the template, and returns the leaf's, or ``MISSING``.
        shard: Index in :attr:`LoadTemplate.shards` of the leaf's shard; None for a factory, a PlainObject or a local
            value.
    """

    compute: Callable[[list[Any]], Any]
    shard: int | None = None


class LoadTemplate:
    """The structure of the state dict to load. The caller's dict and descriptions are not changed.

    It is a ShardingError if a leaf is one rank's part of a tensor, such as a DTensor, but not described as a shard.

    Args:
        wanted: The state dict to load.
        list_stored: Returns the names that the checkpoint stores, by which optional entries are left out. It is called
            once, and only if there are optional entries. By default nothing is stored.

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
        self,
        values: list[Any],
        common: StateDict,
        *,
        in_common: Collection[int] = frozenset(),
        replaces_any: bool = False,
    ) -> StateDict:
        """Return the state dict, filled with loaded values and the common state, which is not changed.

        It is an error if the common state has a value where the template has a shard, unless the shard replaces it; or
        a list of another length where the template's has shards in it.

        Args:
            values: The loaded value of every shard in :attr:`shards`, in order, or ``MISSING``.
            common: The values of all other leaves.
            in_common: Indices of shards that replace the values which the common state has in their places: their
                objects were built from these, as plain DCP stores them.
            replaces_any: Whether the other shards replace values, too.
        """
        filled = _Filler(values, in_common, replaces_any).fill(self._tree, common, "")
        return {} if filled is MISSING else filled

    def find_ignored_tensors(self, common: StateDict) -> list[str]:
        """Return the paths of wanted tensors that are neither described by a shard nor in the common state."""
        return [format_path(path) for path, _, stored in self._pair_tensors(common) if stored is MISSING]

    def find_misshapen(self, common: StateDict) -> list[str]:
        """Return paths and shapes of wanted tensors that the common state has in other shapes."""
        return [
            f"{format_path(path)} {tuple(stored.shape)} for {tuple(wanted.shape)}"
            for path, wanted, stored in self._pair_tensors(common)
            if isinstance(stored, torch.Tensor) and stored.shape != wanted.shape
        ]

    def _pair_tensors(self, common: StateDict) -> Iterable[tuple[tuple[Any, ...], torch.Tensor, Any]]:
        return _pair_tensors(self._tree, common, ()) if self._has_tensors else ()

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
                # refuse_parts looks at these, with their paths: nothing would fill a shard in a container
                self._may_have_parts |= may_have_parts(wanted)
                self._has_tensors |= isinstance(wanted, torch.Tensor)
        return tree

    def _add_shard(self, shard: ShardedBase) -> _Placeholder:
        index = len(self.shards)
        # nearly every leaf is one, and two calls take as long as the copy
        self.shards.append(shard.__copy__() if type(shard) is ShardedTensor else build_copy(shard))
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


def _merge(tree: Any, merge_fn: FactoryMergeFn, values: list[Any]) -> Any:
    """Return a factory's value: merge_fn gets its loaded shards, and the plain leaves that build_fn made."""
    filled = dict_list_map_outplace(lambda leaf: leaf.compute(values) if isinstance(leaf, _Placeholder) else leaf, tree)
    return MISSING if any(value is MISSING for value in nested_values(filled)) else merge_fn(filled)


class _Filler(NamedTuple):
    """Fills a template's tree in one walk over the tree and the common state; fields as for LoadTemplate.fill."""

    values: list[Any]
    in_common: Collection[int]
    replaces_any: bool

    def fill(self, wanted: Any, common: Any, path: str) -> Any:
        """Return ``wanted`` with the loaded values, and for all other leaves the common state at the same path."""
        if isinstance(wanted, _Placeholder):
            if common is not MISSING and not self._may_replace(wanted):
                raise CheckpointingException(
                    f"the checkpoint's common state has a value at {path or 'the top level'}, where the state dict to "
                    "load has a sharded or local one: describe it as it was saved"
                )
            return wanted.compute(self.values)
        if not isinstance(wanted, (dict, list)):
            return common
        if common is not MISSING and not isinstance(common, dict if isinstance(wanted, dict) else list):
            if not _has_placeholder(wanted):
                return common
            if not self._may_replace(wanted):
                raise CheckpointingException(
                    f"the checkpoint's common state has a {type(common).__name__} at {path or 'the top level'}, where "
                    f"the state dict to load has a {type(wanted).__name__} with shards"
                )
            common = MISSING
        if isinstance(wanted, dict):
            filled: Any = self._fill_dict(wanted, common, path)
        else:
            filled = self._fill_list(wanted, common, path)
        return MISSING if common is MISSING and wanted and not filled else filled

    def _fill_dict(self, wanted: dict[Any, Any], common: Any, path: str) -> dict[Any, Any]:
        stored: dict[Any, Any] = {} if common is MISSING else common
        result = copy.copy(stored)
        for key, tree in wanted.items():
            if type(tree) is _Placeholder and key not in stored:  # the usual case, which needs no path
                value = tree.compute(self.values)
            else:
                value = self.fill(tree, stored.get(key, MISSING), f"{path}[{key!r}]")
            if value is MISSING:
                result.pop(key, None)
            else:
                result[key] = value
        return result

    def _fill_list(self, wanted: list[Any], common: Any, path: str) -> list[Any]:
        if common is MISSING:
            stored = [MISSING] * len(wanted)
        elif len(common) == len(wanted):  # each item has a stored value: fill() refuses one in the place of a shard
            stored = common
        else:
            # a save leaves shards out of a list, and plain DCP tensors: the stored list has the other items, in order
            is_stored = [_has_common(tree) or _has_placeholder(tree, self.in_common) for tree in wanted]
            if len(common) != sum(is_stored):
                if not _has_placeholder(wanted):
                    return common  # type: ignore[no-any-return]  # the checkpoint's list, whatever its length
                raise CheckpointingException(
                    f"the checkpoint's common state has a list of {len(common)} values at {path}, the state dict to "
                    f"load has {sum(is_stored)} there that a common state has, in whole or in part"
                )
            remaining = iter(common)
            stored = [next(remaining) if found else MISSING for found in is_stored]
        pairs = enumerate(zip(wanted, stored, strict=True))
        values = [self.fill(tree, value, f"{path}[{number}]") for number, (tree, value) in pairs]
        return [value for value in values if value is not MISSING]

    def _may_replace(self, wanted: Any) -> bool:
        """Return whether all leaves of a tree are shards that replace common state at the same path."""
        return not _has_common(wanted) and all(
            self.replaces_any or leaf.shard in self.in_common for leaf in nested_values(wanted)
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

"""A checkpoint under other names: ``optim.`` as ``optimizer.``."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException, KeyMismatchError, ask_nearest, listed
from shardckpt.mapping.sharded_object import PlainObject, ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.strategy import (
    BuildsObjects,
    ChecksFiles,
    ListsBoxes,
    LoadStrategy,
    NestsState,
    ReadsPlainObjects,
    StoredColumns,
    lists_columns,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.manifest.models import Manifest
    from shardckpt.mapping.base import ShardedBase, StateDict
    from shardckpt.storage.reader import CheckpointReader
    from shardckpt.strategy import LoadContext, StoredBox, StoredFile

#: Entries of an optimizer's state dict.
_GROUPS, _PARAMS = "param_groups", "params"


def parse_renames(rename: object) -> dict[str, str]:
    """Return a caller's new names by the old ones; a value that is no dict of texts is a CheckpointingException."""
    if rename is None:
        return {}
    if not (isinstance(rename, Mapping) and all(isinstance(name, str) for pair in rename.items() for name in pair)):
        raise CheckpointingException(
            f"rename={rename!r:.200}: give a dict from old names to new ones, such as {{'optim': 'optimizer'}}"
        )
    return dict(rename)


def rename_stored(checkpoint: OpenCheckpoint, names: Mapping[str, str], keys: Sequence[str]) -> OpenCheckpoint:
    """Return an open checkpoint under other names, which are the same on every rank.

    ``names`` maps stored keys, or their dotted prefixes, to new ones; of several prefixes of a key the longest counts,
    and ``""`` begins every key. It is a KeyMismatchError if the checkpoint has nothing of one of these names, or two
    things would have one name.
    """
    with checkpoint.operation.local_phase("renaming the stored keys"):
        _check(names, keys)
    if not names:
        return checkpoint
    return replace(checkpoint, strategy=_RenamedLoadStrategy(checkpoint.strategy, names), names=names)


def list_names(checkpoint: OpenCheckpoint) -> list[str]:
    """Collective: return the keys of all that is stored, and the dotted paths of the common state."""
    return [*list_keys(checkpoint), *_list_paths(checkpoint.common())]


def list_keys(checkpoint: OpenCheckpoint) -> list[str]:
    """Collective: return the keys of all that is stored except the common state."""
    columns = checkpoint.columns()
    objects = (ShardedObject.empty_from_unique_key(name).key for name in columns.objects)
    return [*columns.keys, *columns.values, *objects]


def list_top_names(keys: Iterable[str]) -> list[str]:
    """Return the first parts of dotted keys, sorted."""
    return sorted({key.partition(".")[0] for key in keys})


def _check(names: Mapping[str, str], keys: Sequence[str]) -> None:
    begun = {name for key in keys for name in _list_beginnings(key)}
    kept = {name for key in keys if rename_key(key, names) == key for name in _list_beginnings(key)}
    for old, new in names.items():
        if old == new:
            raise KeyMismatchError(f"rename: {old!r} is given as its own new name: leave it out, or give another")
        if old not in begun:
            top = list_top_names(keys)
            near = ask_nearest(old, [*top, *keys])
            raise KeyMismatchError(
                f"rename: the checkpoint has nothing under {old!r}: {near}its top-level names are {listed(top)}"
            )
        if not new and old in keys and not any(key.startswith(f"{old}.") for key in keys):
            raise KeyMismatchError(f"rename: {old!r} is a whole key: '' in its place leaves it no name; give it one")
        if new in kept:
            taken = [key for key in keys if _begins(key, new) and rename_key(key, names) == key]
            raise KeyMismatchError(
                f"rename: {old!r} cannot become {new!r}: the checkpoint has {listed(taken, limit=3)}; rename that, too"
            )
    back = _invert(names)
    for key in keys if names else ():
        if names.get(key) == "":  # a dict of the common state, whose parts are keys too
            continue
        if (other := rename_key(rename_key(key, names), back)) != key:
            raise KeyMismatchError(
                f"rename: {key!r} and {other!r} cannot both become {rename_key(key, names)!r}: give each a name of its "
                "own"
            )


class _RenamedLoadStrategy(LoadStrategy):
    """Loads through another strategy by other names."""

    can_build: Callable[[Sequence[ShardedObject], LoadContext], list[bool]]
    list_columns: Callable[[LoadContext], StoredColumns]
    list_files: Callable[[CheckpointReader], list[StoredFile]]
    check_files: Callable[[CheckpointReader], dict[str, CheckpointingException | None]]
    list_boxes: Callable[[CheckpointReader], Iterable[StoredBox]]
    read_plain_objects: Callable[[LoadContext], list[PlainObject]]
    list_plain_objects: Callable[[LoadContext], list[str]]
    nest_state: Callable[[Mapping[str, Any], Callable[[str], bool], LoadContext], StateDict | None]

    def __init__(self, strategy: LoadStrategy, names: Mapping[str, str]) -> None:
        self._strategy, self._names = strategy, dict(names)
        self._stored_names = _invert(names)
        self.backend, self.version = strategy.backend, strategy.version  # type: ignore[misc]
        self.reads = strategy.reads  # type: ignore[misc]
        if isinstance(strategy, BuildsObjects):
            can_build = strategy.can_build

            def build(wanted: Sequence[ShardedObject], context: LoadContext) -> list[bool]:
                stored = [_with_key(shard, self._stored_names) for shard in wanted]
                found = can_build(stored, context)
                # renamed items are not found by their old names
                pairs = zip(wanted, stored, found, strict=True)
                return [is_built and rename_key(old.key, names) == new.key for new, old, is_built in pairs]

            self.can_build = build
        if lists_columns(strategy):
            list_columns = strategy.list_columns
            self.list_columns = lambda context: _rename_columns(list_columns(context), self._names)
        self._pass_abilities(strategy)

    def _pass_abilities(self, strategy: LoadStrategy) -> None:
        """Copy the optional abilities of the wrapped strategy; they use the new names."""
        names = self._names
        if isinstance(strategy, ChecksFiles):
            list_files, self.check_files = strategy.list_files, strategy.check_files
            self.list_files = lambda reader: [
                replace(
                    file,
                    keys=tuple(rename_key(key, names) for key in file.keys),
                    ends={rename_key(key, names): end for key, end in file.ends.items()},
                )
                for file in list_files(reader)
            ]
        if isinstance(strategy, ListsBoxes):
            list_boxes = strategy.list_boxes
            self.list_boxes = lambda reader: (
                box._replace(key=rename_key(box.key, names)) for box in list_boxes(reader)
            )
        if isinstance(strategy, NestsState):
            nest = strategy.nest_state

            def nest_renamed(
                tensors: Mapping[str, Any], keeps: Callable[[str], bool], context: LoadContext
            ) -> StateDict | None:
                stored = {rename_key(key, self._stored_names): value for key, value in tensors.items()}
                nested = nest(stored, lambda path: keeps(rename_key(path, names)), context)
                return None if nested is None else _move_parts(nested, names)

            self.nest_state = nest_renamed
        if isinstance(strategy, ReadsPlainObjects):
            read, list_keys = strategy.read_plain_objects, strategy.list_plain_objects
            self.read_plain_objects = lambda context: [_with_key(shard, names) for shard in read(context)]
            self.list_plain_objects = lambda context: [rename_key(key, names) for key in list_keys(context)]

    def cannot_load(self, manifest: Manifest) -> str | None:
        """Return why the wrapped strategy cannot load the checkpoint, or None if it can."""
        return self._strategy.cannot_load(manifest)

    def load_common(self, context: LoadContext) -> StateDict:
        """Return the common state with its parts at their new places."""
        return _move_parts(self._strategy.load_common(context), self._names)

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored shards by their new keys."""
        return [_with_key(shard, self._names) for shard in self._strategy.load_index(context)]

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: load the shards by the keys that are stored."""
        return self._strategy.load([_with_key(shard, self._stored_names) for shard in wanted], context)


def _begins(key: str, name: str) -> bool:
    return not name or key == name or key.startswith(f"{name}.")


def _list_beginnings(key: str) -> Iterator[str]:
    """Yield the prefixes of a key, the longest first: the key, the part before each dot, and ``""``."""
    name, dot = key, "."
    while dot:
        yield name
        name, dot, _ = name.rpartition(".")
    yield ""


def rename_key(key: str, names: Mapping[str, str]) -> str:
    """Return a key with the longest name that it begins with replaced; ``""`` begins every key."""
    name = next(filter(names.__contains__, _list_beginnings(key)), None)
    if name is None:
        return key
    renamed = names[name] + (key[len(name) :] if name else f".{key}")
    return renamed if names[name] else renamed[1:]


def _invert(names: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}


def _with_key(shard: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a description with its new key; it shares the data."""
    found = copy.copy(shard)
    found.key = rename_key(shard.key, names)
    if isinstance(shard, PlainObject):
        found.keys = tuple(rename_key(key, names) for key in shard.keys)
    if isinstance(shard, ShardedTensor) and shard.block_scales is not None:
        found.block_scales = shard.block_scales._replace(key=rename_key(shard.block_scales.key, names))
    return found


def _rename_columns(columns: StoredColumns, names: Mapping[str, str]) -> StoredColumns:
    return columns._replace(
        keys=[rename_key(key, names) for key in columns.keys],
        objects=[_with_key(ShardedObject.empty_from_unique_key(key), names).unique_key for key in columns.objects],
        scales={
            rename_key(key, names): each._replace(key=rename_key(each.key, names))
            for key, each in columns.scales.items()
        },
        values=[rename_key(key, names) for key in columns.values],
    )


def _list_paths(values: Any, path: str = "") -> Iterable[str]:
    """Yield the dotted paths of nested dicts and of their values."""
    for key, value in values.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from _list_paths(value, f"{path}{key}.")


def _move_parts(common: StateDict, names: Mapping[str, str]) -> StateDict:
    """Return nested dicts with their parts at new dotted paths; dicts that become empty are left out.

    A new path that leads through a value is a KeyMismatchError.
    """
    found: dict[Any, Any] = {}
    pending: deque[tuple[str, Any, Any]] = deque(("", key, value) for key, value in common.items())
    while pending:
        before, key, value = pending.popleft()
        path = f"{before}{key}"
        is_opened = any(_begins(old, path) and (old != path or not names[old]) for old in names)
        if isinstance(value, dict) and value and is_opened:
            pending += [(f"{path}.", inner, each) for inner, each in value.items()]
            continue
        new = rename_key(path, names)
        if key == _GROUPS and isinstance(value, list):
            value = [_rename_params(group, path, names) for group in value]
        parts: list[Any] = [*before.split(".")[:-1], key] if new == path else list(new.split("."))
        place = found
        for part in parts[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise KeyMismatchError(f"rename: nothing can become {new!r}: {part!r} has no parts")
        last = parts[-1]  # where parts may be that were moved here before the rest
        place[last] = _join(value, place[last], new) if last in place else value
    return found


def _rename_params(group: Any, path: str, names: Mapping[str, str]) -> Any:
    """Return a group of an optimizer with its parameters by the new names of their options."""
    if not (isinstance(group, dict) and isinstance(group.get(_PARAMS), list)):
        return group
    return {**group, _PARAMS: [_rename_last(each, path, names) for each in group[_PARAMS]]}


def _rename_last(name: Any, path: str, names: Mapping[str, str]) -> Any:
    """Return the new name, without the path, of an item stored at a path and a name; the name if it has none."""
    new = names.get(f"{path}.{name}")
    return name if new is None else new.removeprefix(f"{rename_key(path, names)}.")


def _join(one: Any, other: Any, path: str) -> Any:
    """Return the union of two nested dicts, without a change of either.

    Values of both at the same path are a KeyMismatchError.
    """
    if not (isinstance(one, dict) and isinstance(other, dict)):
        raise KeyMismatchError(f"rename: two values of the common state would be at {path!r}: give each its own name")
    joined = {key: _join(one[key], each, f"{path}.{key}") if key in one else each for key, each in other.items()}
    return {**one, **joined}

"""What a checkpoint has of one optimizer, by the name under which it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import KeyMismatchError
from shardckpt.mapping import ShardedObject
from shardckpt.optimizer.names import GROUPS, STATE, Place, place_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from shardckpt.mapping import ShardedBase, StateDict


@dataclass(frozen=True)
class StoredState:
    """The state and options of one optimizer.

    Attributes:
        entries: By name, without the optimizer's own: shards without data, and values of the common state.
        groups: The groups, where they are stored by number; options that are tensors are among the entries.
    """

    entries: dict[str, Any]
    groups: list[dict[str, Any]] | None

    def placed(self, params: Collection[str]) -> dict[str, Place]:
        """Where every entry belongs; those of parameters that the model does not have are left out."""
        number = None if self.groups is None else len(self.groups)
        places = {name: place_of(name, params, number) for name in self.entries}
        return {name: place for name, place in places.items() if place is not None}


def stored_state(key: str, index: Iterable[ShardedBase], common: StateDict) -> StoredState:
    """What is stored under ``<key>.``, and in the common state at that path.

    Raises:
        KeyMismatchError: nothing is.
    """
    shards = list(index)
    entries: dict[str, Any] = {s.key[len(key) + 1 :]: s for s in shards if s.key.startswith(f"{key}.") and _single(s)}
    nest = _below(common, key.split("."))
    groups = nest[GROUPS] if isinstance(nest.get(GROUPS), list) else None
    entries.update(_flat({name: value for name, value in nest.items() if groups is None or name != GROUPS}))
    if not entries and not nest:
        there = sorted({shard.key.split(".")[0] for shard in shards} | set(map(str, common)))
        raise KeyMismatchError(
            f"the checkpoint has nothing of an optimizer {key!r}; its top-level names are "
            f"{', '.join(there) or 'none'}: give as optimizer_key what stands before .state in the keys of its state"
        )
    return StoredState(entries, groups)


def _single(shard: ShardedBase) -> bool:
    """Whether it is all of its key: one object of a grid of several says nothing of a parameter."""
    return not isinstance(shard, ShardedObject) or set(shard.global_shape) <= {1}


def _below(common: StateDict, path: list[str]) -> StateDict:
    """The dict at a path of the common state, or an empty one."""
    found: Any = common
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _flat(nest: StateDict) -> Iterator[tuple[str, Any]]:
    """The values of the common state by name; state and options by parameter one by one."""
    for name, value in nest.items():
        if name not in (STATE, GROUPS) or not isinstance(value, dict):
            yield str(name), value
            continue
        for param, values in value.items():
            slots = (
                {f".{slot}": content for slot, content in values.items()} if isinstance(values, dict) else {"": values}
            )
            yield from ((f"{name}.{param}{slot}", content) for slot, content in slots.items())


__all__ = ["StoredState", "stored_state"]

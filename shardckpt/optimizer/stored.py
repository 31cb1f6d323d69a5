"""Find the stored state of one optimizer in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import KeyMismatchError
from shardckpt.mapping import ShardedObject
from shardckpt.optimizer.names import GROUPS, STATE, StateName, parse_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from shardckpt.mapping import ShardedBase, StateDict


@dataclass(frozen=True)
class StoredState:
    """The state and options of one optimizer.

    Attributes:
        entries: Shards without data, and values of the common state, by name without the optimizer's key.
        groups: The groups, if they are stored by number; options that are tensors are among the entries. Else None.
    """

    entries: dict[str, Any]
    groups: list[dict[str, Any]] | None

    def parse_names(self, params: Collection[str]) -> dict[str, StateName]:
        """Return the parsed name of every entry, without those of parameters that the model does not have."""
        count = None if self.groups is None else len(self.groups)
        parsed = {name: parse_name(name, params, count) for name in self.entries}
        return {name: found for name, found in parsed.items() if found is not None}


def find_stored_state(key: str, index: Iterable[ShardedBase], common: StateDict) -> StoredState:
    """Return the stored shards whose keys begin with ``<key>.``, and the values at that path of the common state.

    Raises:
        KeyMismatchError: there are none.
    """
    shards, prefix = list(index), f"{key}."
    # objects of a grid of several belong to no single parameter
    single = (s for s in shards if not isinstance(s, ShardedObject) or set(s.global_shape) <= {1})
    entries: dict[str, Any] = {s.key[len(prefix) :]: s for s in single if s.key.startswith(prefix)}
    found: Any = common
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    values: StateDict = found if isinstance(found, dict) else {}
    groups = values[GROUPS] if isinstance(values.get(GROUPS), list) else None
    entries.update(_flatten({name: value for name, value in values.items() if groups is None or name != GROUPS}))
    # groups alone are enough: plain SGD has no state
    if not entries and not values:
        names = sorted({shard.key.split(".")[0] for shard in shards} | set(map(str, common)))
        raise KeyMismatchError(
            f"the checkpoint has no state of an optimizer {key!r}; its top-level names are "
            f"{', '.join(names) or 'none'}: pass the part of the keys before .state as optimizer_key"
        )
    return StoredState(entries, groups)


def _flatten(values: StateDict) -> Iterator[tuple[str, Any]]:
    """Yield values of the common state with their names; state and options of a parameter one by one."""
    for name, value in values.items():
        if name not in (STATE, GROUPS) or not isinstance(value, dict):
            yield str(name), value
            continue
        for param, content in value.items():
            if isinstance(content, dict):
                yield from ((f"{name}.{param}.{slot}", inner) for slot, inner in content.items())
            else:
                yield f"{name}.{param}", content

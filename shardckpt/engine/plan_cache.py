"""Plans that are used again: shards with the metadata of an earlier save's are neither validated nor planned anew.

A training saves the same shards again and again, with other values. What is validated across ranks, and planned with
them, depends on the shards' metadata alone. To compare that with an earlier save's is much cheaper than either.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.state_dict import checked_copy
from shardckpt.strategy import AsyncSaveStrategy, find_plan_cache_key
from shardckpt.tensors import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext, PreparedSave, SaveStrategy
    from shardckpt.validation import GivenShards, Replicas

_Plan = TypeVar("_Plan")
_LASTING = (Integral, str, type(None), torch.dtype)
_OF_OBJECTS = ("key", "global_shape", "global_offset", "replica_id", "replicated")
_OF_TENSORS = (
    *_OF_OBJECTS,
    "dtype",
    "local_shape",
    "axis_fragmentations",
    "prepend_axis_num",
    "allow_shape_mismatch",
)


class PlanCache(Generic[_Plan]):
    """The newest plans of this process, one rank's part of each.

    :meth:`find` asks no other rank: ranks use what they find only after they agreed that all have found the same plan.

    Args:
        size: Plans that are kept; with 0, none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: list[tuple[Hashable, _Plan]] = []

    def find(self, key: Hashable, fits: Callable[[_Plan], bool] = lambda _: True) -> _Plan | None:
        """Return the newest plan that was added with the key and fits, or None."""
        return next((plan for known, plan in self._entries if known == key and fits(plan)), None)

    def add(self, key: Hashable, plan: _Plan) -> None:
        """Keep a plan, in the place of the oldest if there are too many."""
        self._entries = [(key, plan), *self._entries][: self._size]

    def clear(self) -> None:
        """Drop all plans."""
        self._entries = []

    def find_or_plan(self, share: object, group: Comm, plan: Callable[[], _Plan]) -> _Plan:
        """Collective: return the group's last plan if no rank's share has changed since, else plan anew.

        The cache must serve nothing else: it is cleared before each new plan, so all ranks hold the same one or none.

        Args:
            share: What the plan depends on, of this rank: plain data whose ``repr`` says everything of it.
            group: The ranks that plan.
            plan: Plans with all ranks; collective.

        Returns:
            The plan.
        """
        if not self._size:
            return plan()
        key = hashlib.sha256(repr((group.members, group.rank, share)).encode()).digest()
        found = self.find(key)
        is_known = group.all_true(found is not None)
        if found is not None and is_known:
            return found
        self.clear()  # if planning fails on one rank, that rank holds no plan, and all plan anew the next time
        made = plan()
        self.add(key, made)
        return made


#: The plans of this process's last saves: a job may save two states in turn.
saved_plans: PlanCache[CachedPlan] = PlanCache(2)
os.register_at_fork(after_in_child=saved_plans.clear)


class Description(NamedTuple):
    """All that a rank's shards say, and the form of their tensors; not what is in them.

    Attributes:
        kinds: Of all shards.
        fields: A column for each field of the objects, then of the tensors.
        slices: The flattened ranges of the tensors.
        forms: The shapes and the dtypes of what the tensors hold.
    """

    kinds: list[type[Any]]
    fields: list[list[Any]]
    slices: list[slice | None]
    forms: tuple[list[tuple[int, ...]], list[torch.dtype]]


@dataclass
class CachedPlan:
    """A save that all ranks have checked and planned.

    Attributes:
        description: Of this rank's shards.
        save_id: The save's name, the same on all ranks.
        validated: Whether the shards of all ranks were found to fit together.
        plan: What the strategy plans another one by.
        replicas: Which ranks have which of the replicated shards.
        given: The shards, to be compared with what is stored.
        layout: Where the tensors of a background save stand in staging memory.
    """

    description: Description
    save_id: str
    validated: bool
    plan: Any
    replicas: Replicas
    given: GivenShards
    layout: Any = None


@dataclass
class PlanLookup:
    """What this rank's cache has for shards that are to be saved.

    Attributes:
        key: Of the strategy and the ranks; None where the strategy's plans are not cached.
        description: Of the shards; None where it does not say all that a plan depends on.
        cached: The plan, if there is one.
    """

    key: Hashable = None
    description: Description | None = None
    cached: CachedPlan | None = None

    @property
    def save_id(self) -> bytes:
        """The save that was planned: the same on all ranks if all have found the same plan, or none has found any."""
        return b"" if self.cached is None else self.cached.save_id.encode()


def look_up_plan(shards: Sequence[ShardedBase], saver: SaveStrategy, comm: Comm, *, validate: bool) -> PlanLookup:
    """Look whether this rank has a plan for these shards; it asks no other rank.

    Args:
        shards: The rank's, before anything is checked.
        saver: The strategy that saves them.
        comm: The ranks that save.
        validate: Whether only a plan will do whose shards were found to fit together.

    Returns:
        The look-up, with or without a plan.
    """
    strategy_key = find_plan_cache_key(saver)
    if strategy_key is None:
        return PlanLookup()
    key = (strategy_key, tuple(comm.members), comm.rank)
    description = describe(shards)

    def fits(cached: CachedPlan) -> bool:
        return (cached.validated or not validate) and _same(cached.description, description)

    return PlanLookup(key, description, saved_plans.find(key, fits))


@dataclass(eq=False)
class CachingSaveStrategy(AsyncSaveStrategy):
    """A strategy with the plan cache before it: it replans where there is a plan, else it prepares and adds the plan.

    Attributes:
        strategy: Plans the save.
        lookup: What the caches of all ranks have for the shards; after the planning, the plan that serves the next one.
        replicas: Which ranks have which of the replicated shards.
        given: The shards, to be compared with what is stored.
        validated: Whether the shards of all ranks were found to fit together.
    """

    strategy: AsyncSaveStrategy
    lookup: PlanLookup
    replicas: Replicas
    given: GivenShards
    validated: bool

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: plan by the cached plan if there is one that serves, else anew."""
        lookup = self.lookup
        if lookup.cached is not None:
            prepared = self.strategy.replan(lookup.cached.plan, shards, common, context)
            if prepared is not None:
                return prepared
            shards = list(map(checked_copy, shards))  # where a plan is cached, they are the caller's own until here
        prepared = self.strategy.prepare(shards, common, context)
        lookup.cached = None
        if prepared.plan is not None and lookup.description is not None and _is_lasting(lookup.description):
            lookup.cached = CachedPlan(
                lookup.description, context.save_id, self.validated, prepared.plan, self.replicas, self.given
            )
            saved_plans.add(lookup.key, lookup.cached)
        return prepared


def describe(shards: Sequence[ShardedBase]) -> Description | None:
    """What shards say of themselves; None if they, or their tensors, are of classes that may have more to say."""
    tensors = [shard for shard in shards if type(shard) is ShardedTensor]
    objects = [shard for shard in shards if type(shard) is ShardedObject]
    data: list[Any] = [shard.data for shard in tensors]
    if len(tensors) + len(objects) < len(shards) or not set(map(type, data)) <= set(ORDINARY):
        return None
    return Description(
        list(map(type, shards)),
        [*_columns(_OF_OBJECTS, objects), *_columns(_OF_TENSORS, tensors)],
        [shard.flattened_range for shard in tensors],
        ([tensor.shape for tensor in data], [tensor.dtype for tensor in data]),
    )


def _columns(names: Iterable[str], shards: Sequence[ShardedBase]) -> Iterator[list[Any]]:
    return (list(map(attrgetter(name), shards)) for name in names)


def _same(one: Description, other: Description | None) -> bool:
    try:
        return one == other
    except Exception:  # noqa: BLE001 - arrays do not say yes or no; they are never what is cached
        return False


def _is_lasting(description: Description) -> bool:
    """Whether the caller cannot change what it holds: all fields are numbers, texts, dtypes, and tuples of them."""
    values = [value for column in description.fields for value in column]
    kinds = {type(value) for value in values if not isinstance(value, tuple)}
    kinds.update(type(part) for value in values if isinstance(value, tuple) for part in value)
    return all(issubclass(kind, _LASTING) for kind in kinds)


__all__ = [
    "CachedPlan",
    "CachingSaveStrategy",
    "Description",
    "PlanCache",
    "PlanLookup",
    "describe",
    "look_up_plan",
    "saved_plans",
]

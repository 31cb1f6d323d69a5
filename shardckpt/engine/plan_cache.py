"""The plan cache: a save whose shards have the same metadata as a recent one reuses its validation and its plan.

A training job saves the same shards again and again, with other values. Validation across ranks and planning depend
only on the shards' metadata, and comparing that with a recent save's is much cheaper than either.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.state_dict import validated_copy
from shardckpt.strategy import AsyncSaveStrategy, find_plan_cache_key
from shardckpt.tensors import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext, PreparedSave, SaveStrategy
    from shardckpt.validation import GivenShards, Replicas

_Plan = TypeVar("_Plan")
#: Immutable types: a description that consists of them stays as it was when its save was planned.
_LASTING = (Integral, str, type(None), torch.dtype)
_OBJECT_FIELDS = ("key", "global_shape", "global_offset", "replica_id", "replicated")
_TENSOR_FIELDS = (
    *_OBJECT_FIELDS,
    "dtype",
    "local_shape",
    "axis_fragmentations",
    "prepend_axis_num",
    "allow_shape_mismatch",
)


class PlanCache(Generic[_Plan]):
    """The most recent plans of this process: one rank's part of each.

    Plans of saves are in :data:`saved_plans`. A fully parallel wrapper has a cache of its own, of one plan: its owner
    decides by ``do_cache_distribution`` whether there is one, and its plan must not push those of saves out.

    :meth:`find` is not collective. Ranks use a plan only after they have agreed that all have found the same one: a
    rank that planned alone would wait for the others.

    Args:
        size: Number of plans that are kept; 0: none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: list[tuple[Hashable, _Plan]] = []

    def find(self, key: Hashable, fits: Callable[[_Plan], bool] = lambda _: True) -> _Plan | None:
        """Return the newest plan of a key for which ``fits`` is true, or None.

        Args:
            key: The key that the plan was added with.
            fits: Called with plans of that key, the newest first.
        """
        return next((plan for other, plan in self._entries if other == key and fits(plan)), None)

    def add(self, key: Hashable, plan: _Plan) -> None:
        """Add a plan; if there are too many, drop the oldest."""
        self._entries = [(key, plan), *self._entries][: self._size]

    def clear(self) -> None:
        """Drop all plans."""
        self._entries = []

    def find_or_plan(self, share: object, group: Comm, plan: Callable[[], _Plan]) -> _Plan:
        """Collective: return the group's last plan if its input is the same on every rank, else make a new one.

        The cache must not be used for anything else: it is cleared before a plan is made, so all ranks have the same
        plan or none.

        Args:
            share: This rank's part of the plan's input: plain data that its ``repr`` describes completely.
            group: The ranks that plan.
            plan: Makes the plan with all ranks; collective.

        Returns:
            The plan.
        """
        if not self._size:
            return plan()
        # a hash: the input may list a million shards, and a cache that kept it would hold it for the whole job
        key = hashlib.sha256(repr((group.members, group.rank, share)).encode()).digest()
        found = self.find(key)
        is_cached = group.all_true(found is not None)
        if found is not None and is_cached:
            return found
        self.clear()  # if planning fails on one rank, that rank has no plan, and the next time all ranks plan
        new = plan()
        self.add(key, new)
        return new


#: The plans of this process's last saves: two, since a job may save two state dicts in turn.
saved_plans: PlanCache[CachedPlan] = PlanCache(2)
# A forked child, such as a data loader's worker, plans with other ranks or none, and would keep alive what plans hold.
os.register_at_fork(after_in_child=saved_plans.clear)


class Description(NamedTuple):
    """The metadata of a rank's shards, in columns: comparing lists is faster than comparing objects.

    Attributes:
        kinds: The class of each shard.
        fields: A column per field of the objects, then of the tensors, then of the plain objects alone.
        slices: The flattened ranges of the tensors.
        forms: The shapes and the dtypes of the tensors' data.
    """

    kinds: list[type[Any]]
    fields: list[list[Any]]
    slices: list[slice | None]
    forms: tuple[list[tuple[int, ...]], list[torch.dtype]]


@dataclass
class CachedPlan:
    """This rank's part of a save that all ranks have checked and planned.

    Attributes:
        description: The metadata of this rank's shards.
        save_id: The save's id, the same on all ranks.
        validated: Whether the shards of all ranks were validated.
        plan: The :attr:`shardckpt.strategy.PreparedSave.plan` of the save.
        replicas: Which ranks have which of the replicated shards.
        given: The shards that the strategy was given, to compare with what it stores.
        layout: Offsets of the tensors in the staging memory of a background save.
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
    """The result of looking up the plan for a save in this rank's cache.

    Attributes:
        key: The key of the strategy and the ranks; None if the strategy's plans are not cached.
        description: The metadata of the shards; None if a plan may depend on more than that.
        cached: The plan, if there is one.
    """

    key: Hashable = None
    description: Description | None = None
    cached: CachedPlan | None = None

    @property
    def save_id(self) -> bytes:
        """Id of the save that was planned, or ``b""``: equal on all ranks if all found the same plan, or none did."""
        return b"" if self.cached is None else self.cached.save_id.encode()


def look_up_plan(shards: Sequence[ShardedBase], saver: SaveStrategy, comm: Comm, *, validate: bool) -> PlanLookup:
    """Look up the plan for these shards in this rank's cache. Not collective.

    Args:
        shards: This rank's, before anything is checked.
        saver: The strategy that saves them.
        comm: The ranks that save.
        validate: Whether to find only plans whose shards were validated.

    Returns:
        The result, with or without a plan.
    """
    strategy_key = find_plan_cache_key(saver)
    if strategy_key is None:
        return PlanLookup()
    key = (strategy_key, tuple(comm.members), comm.rank)
    description = describe(shards)

    def fits(cached: CachedPlan) -> bool:
        return (cached.validated or not validate) and _same(cached.description, description)

    cached = saved_plans.find(key, fits)
    # the cached one, which is equal: so the new one is freed before Python's garbage collector visits all of it
    return PlanLookup(key, description if cached is None else cached.description, cached)


@dataclass(eq=False)
class CachingSaveStrategy(AsyncSaveStrategy):
    """Wraps a strategy with the plan cache: it replans if there is a plan, else it prepares and caches the plan.

    Attributes:
        strategy: The wrapped strategy.
        lookup: What was found in the cache; ``prepare`` sets ``lookup.cached`` to the plan that the next save can use.
        replicas: As in :class:`CachedPlan`.
        given: As in :class:`CachedPlan`.
        validated: As in :class:`CachedPlan`.
    """

    strategy: AsyncSaveStrategy
    lookup: PlanLookup
    replicas: Replicas
    given: GivenShards
    validated: bool

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: return the save as prepared by the cached plan, or a new one where the strategy cannot use it."""
        lookup = self.lookup
        if lookup.cached is not None:
            prepared = self.strategy.replan(lookup.cached.plan, shards, common, context)
            if prepared is not None:
                return prepared
            # with a cached plan the shards were not copied yet: they are the caller's own
            shards = list(map(validated_copy, shards))
        prepared = self.strategy.prepare(shards, common, context)
        lookup.cached = None
        if prepared.plan is not None and lookup.description is not None and _is_lasting(lookup.description):
            lookup.cached = CachedPlan(
                lookup.description, context.save_id, self.validated, prepared.plan, self.replicas, self.given
            )
            saved_plans.add(lookup.key, lookup.cached)
        return prepared


def describe(shards: Sequence[ShardedBase]) -> Description | None:
    """Return the metadata of shards; None if a shard or tensor is of a class that may have more than these fields."""
    kinds = list(map(type, shards))
    is_all = set(kinds) == {ShardedTensor}  # nearly always, and a loop over many shards takes its time
    tensors: Sequence[Any] = shards if is_all else [shard for shard in shards if type(shard) is ShardedTensor]
    objects = [] if is_all else [shard for shard in shards if type(shard) in (ShardedObject, PlainObject)]
    plain = [shard for shard in objects if type(shard) is PlainObject]
    data: list[Any] = list(map(attrgetter("data"), tensors))
    if len(tensors) + len(objects) < len(shards) or not set(map(type, data)) <= set(ORDINARY):
        return None
    scales = list(map(attrgetter("block_scales"), tensors))
    if scales.count(None) < len(scales):
        scales = [found and (found.key, *found.block) for found in scales]
    return Description(
        kinds,
        [*_columns(_OBJECT_FIELDS, objects), *_columns(_TENSOR_FIELDS, tensors), scales, *_columns(("keys",), plain)],
        list(map(attrgetter("flattened_range"), tensors)),
        (list(map(torch.Tensor.size, data)), list(map(attrgetter("dtype"), data))),
    )


def _columns(names: Iterable[str], shards: Sequence[ShardedBase]) -> Iterator[list[Any]]:
    return (list(map(attrgetter(name), shards)) for name in names)


def _same(one: Description, other: Description | None) -> bool:
    try:
        return one == other
    except Exception:  # noqa: BLE001 - a field may hold an array, which has no truth value; those are never cached
        return False


def _is_lasting(description: Description) -> bool:
    """Return whether the caller cannot change the fields: they are numbers, strings, dtypes, and tuples of them."""
    kinds: set[type] = set()
    for column in description.fields:
        found = set(map(type, column))
        kinds.update(kind for kind in found if not issubclass(kind, tuple))
        if any(issubclass(kind, tuple) for kind in found):
            tuples = (value for value in column if isinstance(value, tuple))
            kinds.update(map(type, chain.from_iterable(tuples)))
    return all(issubclass(kind, _LASTING) for kind in kinds)

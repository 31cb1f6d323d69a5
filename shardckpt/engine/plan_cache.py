"""The plan cache: a save whose shards have the same metadata as a recent one reuses its validation and its plan.

A training job saves the same shards again and again, with other values. Validation across ranks and planning depend
only on the shards' metadata, and comparing that with a recent save's is much cheaper than either.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch

from shardckpt.mapping.sharded_object import PlainObject, ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import validated_copy
from shardckpt.strategy import AsyncSaveStrategy, find_plan_cache_key
from shardckpt.tensors.memory import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext, PreparedSave, SaveStrategy
    from shardckpt.validation.completeness import GivenShards
    from shardckpt.validation.replicas import Replicas

logger = logging.getLogger(__name__)

_Plan = TypeVar("_Plan")
#: Shards that are described together: few enough that the processor's cache still has them at their last field, and
#: that a description made only for a comparison is freed before Python's garbage collector visits it.
_BLOCK = 256
#: Immutable types: a description that consists of them is the same as when its save was planned.
_LASTING = (Integral, str, type(None), torch.dtype)
_FIELDS = ("key", "global_shape", "global_offset", "replica_id", "replicated")
#: The fields of shards that are no tensors, by their class.
_OBJECT_FIELDS: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {
    ShardedObject: attrgetter(*_FIELDS),
    PlainObject: attrgetter(*_FIELDS, "keys"),
}


class PlanCache(Generic[_Plan]):
    """The ``size`` most recent plans of this process: one rank's part of each.

    Plans of saves are in :data:`saved_plans`. A fully parallel wrapper has a cache of its own, of one plan: its owner
    decides by ``do_cache_distribution`` whether there is one, and its plan must not push plans of saves out.

    :meth:`find` is not collective. Ranks use a plan only after they have agreed that all have found the same one: a
    rank that planned alone would wait for the others.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: list[tuple[Hashable, _Plan]] = []

    def find(self, key: Hashable, fits: Callable[[_Plan], bool] = lambda _: True) -> _Plan | None:
        """Return the newest plan of a key for which ``fits`` is true, or None."""
        return next((plan for other, plan in self._entries if other == key and fits(plan)), None)

    def add(self, key: Hashable, plan: _Plan) -> None:
        """Add a plan; if there are too many, drop the oldest."""
        self._entries = [(key, plan), *self._entries][: self._size]

    def clear(self) -> None:
        """Drop all plans."""
        self._entries = []

    def find_or_plan(self, share: object, group: Comm, plan: Callable[[], _Plan]) -> _Plan:
        """Collective: return the group's last plan if its input is the same on every rank, else make a new one.

        ``share`` is this rank's part of the input: plain data that its ``repr`` describes completely. The cache must
        not be used for anything else: it is cleared before a plan is made, so all ranks have the same plan or none.
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
# A forked child, such as a data loader's worker, plans with other ranks or none, and would keep these plans alive.
os.register_at_fork(after_in_child=saved_plans.clear)


class Block(NamedTuple):
    """The metadata of some of a rank's shards, in lists and tuples: comparing these is faster than comparing objects.

    Attributes:
        kinds: The class of each shard.
        tensors: The fields of each ShardedTensor.
        slices: Their flattened ranges.
        forms: The shapes and the dtypes of their data.
        objects: The fields of each other shard.
    """

    kinds: list[type[Any]]
    tensors: list[tuple[Any, ...]]
    slices: list[slice | None]
    forms: tuple[list[tuple[int, ...]], list[torch.dtype]]
    objects: list[tuple[Any, ...]]


@dataclass
class CachedPlan:
    """This rank's part of a save that all ranks have checked and planned.

    Attributes:
        description: The metadata of this rank's shards, ``_BLOCK`` a block.
        save_id: The save's id, the same on all ranks.
        validated: Whether the shards of all ranks were validated.
        plan: The :attr:`shardckpt.strategy.PreparedSave.plan` of the save.
        replicas: Which ranks have which of the replicated shards.
        given: The shards that the strategy was given, to compare with those that it stores.
        nbytes: The bytes of the tensors that this rank stores.
        layout: Offsets of the tensors in the staging memory of a background save.
    """

    description: list[Block]
    save_id: str
    validated: bool
    plan: Any
    replicas: Replicas
    given: GivenShards
    nbytes: int
    layout: Any = None


@dataclass
class PlanLookup:
    """The result of looking up the plan for a save in this rank's cache.

    The key is of the strategy and the ranks; None if the strategy's plans are not cached. The description is the
    metadata of the shards; None if a plan may depend on more than that.
    """

    key: Hashable = None
    description: list[Block] | None = None
    cached: CachedPlan | None = None

    @property
    def save_id(self) -> bytes:
        """Id of the save that was planned, or ``b""``: equal on all ranks if all found the same plan, or none did."""
        return b"" if self.cached is None else self.cached.save_id.encode()


def look_up_plan(shards: Sequence[ShardedBase], saver: SaveStrategy, comm: Comm, *, validate: bool) -> PlanLookup:
    """Look up the plan for these shards in this rank's cache. Not collective.

    With ``validate`` it finds only plans whose shards were validated.
    """
    strategy_key = find_plan_cache_key(saver)
    if strategy_key is None:
        if comm.is_main:
            _warn_of_lost_cache(type(saver))
        return PlanLookup()
    key = (strategy_key, tuple(comm.members), comm.rank)

    def fits(cached: CachedPlan) -> bool:
        return (cached.validated or not validate) and _fits(cached.description, shards)

    cached = saved_plans.find(key, fits)
    return PlanLookup(key, describe(shards) if cached is None else cached.description, cached)


@functools.cache
def _warn_of_lost_cache(strategy: type[SaveStrategy]) -> None:
    """Warn once if a class has lost its base's plan cache without saying so: each of its saves plans anew."""
    if "caches_plan" not in vars(strategy) and getattr(strategy, "caches_plan", False):
        logger.warning(
            "%s.%s does not inherit caches_plan, so each save plans anew. If its own methods plan by shapes "
            "and keys alone, set caches_plan = True in it; if they must see every save, caches_plan = False ends this "
            "warning",
            strategy.__module__,
            strategy.__qualname__,
        )


@dataclass(eq=False)
class CachingSaveStrategy(AsyncSaveStrategy):
    """Wraps a strategy with the plan cache: it replans if there is a plan, else it prepares and caches the plan.

    ``lookup`` is the result of the cache lookup; ``prepare`` sets ``lookup.cached`` to the plan that the next save can
    use. The other fields are as in :class:`CachedPlan`.
    """

    strategy: AsyncSaveStrategy
    lookup: PlanLookup
    replicas: Replicas
    given: GivenShards
    validated: bool
    nbytes: int

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
                lookup.description,
                context.save_id,
                self.validated,
                prepared.plan,
                self.replicas,
                self.given,
                self.nbytes,
            )
            saved_plans.add(lookup.key, lookup.cached)
        return prepared


def describe(shards: Sequence[ShardedBase]) -> list[Block] | None:
    """Return the metadata of shards; None if a shard or tensor is of a class that may have more than these fields."""
    blocks = list(map(_describe, _cut(shards)))
    return None if None in blocks else cast("list[Block]", blocks)


def _cut(shards: Sequence[ShardedBase]) -> Iterator[Sequence[ShardedBase]]:
    return (shards[start : start + _BLOCK] for start in range(0, len(shards), _BLOCK))


def _describe(shards: Sequence[ShardedBase]) -> Block | None:
    kinds = list(map(type, shards))
    is_all = set(kinds) == {ShardedTensor}  # nearly always, and a loop over many shards takes its time
    tensors = cast("Sequence[ShardedTensor]", shards if is_all else [s for s in shards if type(s) is ShardedTensor])
    objects = [] if is_all else [shard for shard in shards if type(shard) in _OBJECT_FIELDS]
    data: list[Any] = [shard.data for shard in tensors]
    if len(tensors) + len(objects) < len(shards) or not set(map(type, data)) <= set(ORDINARY):
        return None
    rows: list[Any] = [shard.fixed_fields for shard in tensors] if tensors and tensors[0].fixed_fields else [None]
    if None in rows:
        rows = [
            # ShardedTensor.list_fields, written out: the call would take as long as all of this
            (
                s.key,
                s.global_shape,
                s.global_offset,
                s.replica_id,
                s.replicated,
                s.dtype,
                s.local_shape,
                s.axis_fragmentations,
                s.prepend_axis_num,
                s.allow_shape_mismatch,
                s.block_scales and (s.block_scales.key, *s.block_scales.block),
            )
            for s in tensors
        ]
    return Block(
        kinds,
        rows,
        [shard.flattened_range for shard in tensors],
        (list(map(torch.Tensor.size, data)), list(map(attrgetter("dtype"), data))),
        [_OBJECT_FIELDS[type(shard)](shard) for shard in objects],
    )


def _fits(description: list[Block], shards: Sequence[ShardedBase]) -> bool:
    """Return whether shards have the metadata of a description; a difference in the first block is found there."""
    if len(description) != -(-len(shards) // _BLOCK):
        return False
    try:
        return all(map(eq, description, map(_describe, _cut(shards))))
    except Exception:  # noqa: BLE001 - a field may hold an array, which has no truth value; those are never cached
        return False


def _is_lasting(description: list[Block]) -> bool:
    """Return whether the caller cannot change the fields: they are numbers, strings, dtypes, and tuples of them."""
    rows = (row for block in description for row in (*block.tensors, *block.objects))
    values = list(chain.from_iterable(rows))
    inner = chain.from_iterable(value for value in values if isinstance(value, tuple))
    kinds = {kind for kind in set(map(type, values)) if not issubclass(kind, tuple)} | set(map(type, inner))
    return all(issubclass(kind, _LASTING) for kind in kinds)

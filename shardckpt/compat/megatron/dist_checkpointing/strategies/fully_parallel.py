"""megatron.core.dist_checkpointing.strategies.fully_parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt import parallel
from shardckpt.compat.megatron.base_classes import AsyncSaveShardedStrategy, LoadShardedStrategy
from shardckpt.compat.megatron.dist_checkpointing.exchange_utils import ShardDistribution, refuse_group_cache
from shardckpt.compat.megatron.dist_checkpointing.utils import _sharded_tensor_shard_id
from shardckpt.compat.megatron.path_adapter import adapt_loader, adapt_saver
from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.compat.megatron.strategies import LoadsByPath, SavesByPath
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.shard_copies import shard_id
from shardckpt.state_dict import nested_values

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.compat.megatron.dist_checkpointing.utils import _ShardId
    from shardckpt.mapping.base import ShardedBase, ShardedStateDict
    from shardckpt.planning.shard_copies import Assignment, ShardId


class _AdaptsStrategy:
    """Wraps a strategy of shardckpt's or of Megatron's kind, which is adapted first.

    A cache of process groups on disk is refused, because nothing checks what it holds. ``base_strategy`` is the wrapped
    strategy, as it was given.
    """

    _adapt: Callable[[Any], Any]

    def __init__(
        self, strategy: Any, *args: Any, pg_cache_path: str | None = None, pg_cache_create: bool = False, **kwargs: Any
    ) -> None:
        refuse_group_cache(pg_cache_path, pg_cache_create)
        super().__init__(self._adapt(strategy), *args, **kwargs)  # type: ignore[call-arg]
        self.base_strategy = strategy


class FullyParallelSaveStrategyWrapper(
    _AdaptsStrategy, SavesByPath, parallel.FullyParallelSaveStrategyWrapper, AsyncSaveShardedStrategy
):
    """:class:`shardckpt.parallel.FullyParallelSaveStrategyWrapper`, callable with a path.

    Attributes:
        base_strategy: The wrapped strategy, as it was given.
        cached_distribution: The assignment of the group's tensors that the next save reuses, if all ranks have the same
            shards then; None before the first save, and without ``do_cache_distribution``. ``shard_to_metadata`` has
            this rank's shards alone.
    """

    caches_plan = True
    cached_distribution: ShardDistribution | None = None
    _adapt = staticmethod(adapt_saver)

    @property
    def plan_cache_key(self) -> Hashable | None:
        """As of the base; None with ``do_cache_distribution``: by a cached plan no assignment would be noted."""
        return None if self.keeps_distribution else super().plan_cache_key

    def note_assignment(self, assigned: Mapping[Any, Assignment], shards: Sequence[ShardedBase]) -> None:
        """Keep the assignment, if it is reused."""
        if not self.keeps_distribution:
            return
        own = {shard_id(shard): shard.without_data() for shard in shards if isinstance(shard, ShardedTensor)}
        ids = {_to_megatron_id(ours): ours for ours in assigned if ours[0] == "tensor"}
        self.cached_distribution = ShardDistribution(
            {theirs: assigned[ours].rank for theirs, ours in ids.items()},
            set(ids),
            {theirs: own[ours] for theirs, ours in ids.items() if ours in own},
            {theirs: list(assigned[ours].holders) for theirs, ours in ids.items()},
        )


class FullyParallelLoadStrategyWrapper(
    _AdaptsStrategy, LoadsByPath, parallel.FullyParallelLoadStrategyWrapper, LoadShardedStrategy
):
    """:class:`shardckpt.parallel.FullyParallelLoadStrategyWrapper`, callable with a path.

    Attributes:
        base_strategy: The wrapped strategy, as it was given.
    """

    _adapt = staticmethod(adapt_loader)

    @property
    def cached_global_metadata(self) -> Any:
        """That of the wrapped strategy, or None if it has none."""
        return getattr(self.base_strategy, "cached_global_metadata", None)


def _to_megatron_id(ours: ShardId) -> _ShardId:
    """Return Megatron's id of a tensor's shard for ours."""
    _, key, offset, _, flattened_range = ours
    return key, offset, flattened_range


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: ProcessGroup | None,
    precomputed_distribution: ShardDistribution | None,
) -> None:
    """Set the replica ids of the caller's shards by a distribution, in place: 0 on the main rank, 1 elsewhere.

    Args:
        sharded_state_dict: This rank's; in a group of one rank it does not change.
        parallelization_group: The ranks; by default all.
        precomputed_distribution: The result of ``determine_main_replica_uniform_distribution`` for this group.

    Raises:
        CheckpointingException: there is no distribution, and the group has several ranks.
    """
    comm = Comm(parallelization_group)
    if comm.world_size == 1:
        return
    if precomputed_distribution is None:
        raise CheckpointingException("precomputed_distribution=None: a group of several ranks needs one")
    for shard in nested_values(sharded_state_dict):
        if isinstance(shard, ShardedTensor):
            is_main = precomputed_distribution.main_rank_for_shard.get(_sharded_tensor_shard_id(shard)) == comm.rank
            shard.replica_id = 0 if is_main else 1


REFUSED = {
    "_defer_loading_sharded_items": "FullyParallelLoadStrategyWrapper divides what ranks load",
    "_fill_in_deferred_sharded_items": "FullyParallelLoadStrategyWrapper fills in what ranks exchange",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "distribute_main_replicas_with_precomputed_distribution",
]

"""Save as (torch_dist, 1): data files of each rank, DCP's ``.metadata``, Megatron's ``common.pt``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.archive import encode_object
from shardckpt.chunks import ChunkSaveStrategy
from shardckpt.errors import CheckpointingException
from shardckpt.manifest import is_file_name
from shardckpt_torch_dist.dialects import StoredIndex
from shardckpt_torch_dist.plan import (
    ShardedSavePlanner,
    build_index,
    check_planner,
    find_other_keys,
    lay_out,
    make_planner,
    name_planner,
    pickle_objects,
    plan_by,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from shardckpt.chunks import LocalItems, LocalPlan
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext
    from shardckpt_torch_dist.plan import WritePlan


class TorchDistSaveShardedStrategy(ChunkSaveStrategy[StoredIndex, bytes]):
    """Writes the dialect that Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint read.

    Args:
        backend: Must be the class's own, ``torch_dist``; Megatron's callers pass it.
        version: Must be the class's own, 1.
        keep_only_main_replica: Whether only the main replica of a shard may be written. If False, any rank with a copy
            may write it, and the bytes are balanced over all ranks.
        thread_count: Number of files per rank, balanced by bytes. By default one; on file systems known to write only
            through the page cache, as many as can be written concurrently, each of at least 32 MiB.
        cached_metadata: Accepted for Megatron's callers, without effect: saves of the same shards always reuse their
            plan (:mod:`shardckpt.engine.plan_cache`).
        separation_hint: Tensors and objects whose keys begin with it go to separate files,
            ``<hint>__<rank>_<n>.distcp``, which can be removed entirely.
        planner: A :class:`ShardedSavePlanner`, or a subclass of it, that plans instead of the strategy. A class is made
            for each save, with ``flatten_state_dict=False``; an instance serves one save after another. Every rank
            passes one of the same class. Its methods are called as ``dcp.save`` calls them, all before anything is
            written: ``set_up_planner`` with the shards by their keys, ``create_local_plan``, ``create_global_plan`` on
            the main rank (``create_decentralized_global_plan`` on all, if all planners have a true
            ``can_run_decentralized_global_plan``), ``finish_plan``, and ``resolve_data`` for each item.

            A planner may change the values and the dtype of a tensor, cut its boxes into smaller ones, and choose their
            order and, of copies, the rank that writes. ``resolve_data`` must return the planned values. It must not
            leave a shard out, nor add or rename one: the commit refuses that on all ranks. The names of files, the
            common state, digests and the commit are not its own. Its plans are never reused: each save is planned anew.

    Example::

        dist_checkpointing.save(state, path, TorchDistSaveShardedStrategy(thread_count=4))
    """

    backend = "torch_dist"
    version = 1
    reader = "shardckpt 0.1, Megatron-Core 0.9, torch 2.6"
    caches_plan = True
    stores_plain_objects = True
    encoding = "pickling"

    def __init__(
        self,
        backend: str | None = None,
        version: int | None = None,
        keep_only_main_replica: bool = True,
        thread_count: int | None = None,
        cached_metadata: bool = False,  # noqa: ARG002 - see the class
        separation_hint: str | None = None,
        *,
        planner: ShardedSavePlanner | type[ShardedSavePlanner] | None = None,
    ) -> None:
        own = self.backend, self.version
        asked = backend or self.backend, self.version if version is None else version
        if asked != own:
            raise CheckpointingException(f"{type(self).__qualname__} writes {own}, not {asked}")
        super().__init__(keep_only_main_replica=keep_only_main_replica, thread_count=thread_count)
        if separation_hint is not None and (not is_file_name(separation_hint) or "/" in separation_hint):
            raise CheckpointingException(
                f"separation_hint={separation_hint!r}: names of files begin with it, so it has letters, digits, '.', "
                "'_' and '-' only"
            )
        self._hint = separation_hint
        if planner is not None:
            check_planner(planner, ShardedSavePlanner)
            self.stores_all_bytes = False  # type: ignore[misc]  # it may cast them
        self._planner = planner

    @property
    def agreed_options(self) -> Mapping[str, object]:
        """The base's, and the planner's class: ranks with different planners would call different collectives."""
        return {**super().agreed_options, "planner": name_planner(self._planner)}

    @property
    def plan_cache_key(self) -> Hashable | None:
        """The key of the plan, in addition to the shards: the class and its options; None with a planner."""
        return (super().plan_cache_key, self._hint) if self._planner is None else None

    def collect(
        self, shards: Sequence[ShardedBase], aliases: Mapping[str, str], context: PlanContext
    ) -> tuple[LocalItems, dict[str, bytes]]:
        """Collective: return this rank's items, by the planner if there is one; arguments as of the base."""
        if self._planner is None:
            return super().collect(shards, aliases, context)
        with context.comm.local_phase("making the planner"):
            planner = make_planner(self._planner)
            check_planner(planner, ShardedSavePlanner)
        return plan_by(planner, shards, context.comm, context.allow_globals)

    def encode_objects(
        self, objects: Mapping[str, int], shards: Sequence[ShardedBase], context: PlanContext
    ) -> dict[str, bytes]:
        """Return the archives of a rank's objects, by unique key; arguments and errors as of :func:`pickle_objects`."""
        return pickle_objects(objects, shards, context.allow_globals)

    def encode_common(self, common: CommonStateDict, context: PlanContext) -> bytes:
        """Return the archive of the common state; arguments as of the base."""
        return encode_object(common, "the common state", context.allow_globals)

    def measure(self, encoded: bytes) -> int:
        """Return the size of an archive in bytes; arguments as of the base."""
        return len(encoded)

    def lay_out(
        self,
        items: LocalItems,
        objects: Mapping[str, bytes],
        shards: Sequence[ShardedBase],
        rank: int,
        files: int,
    ) -> tuple[WritePlan, LocalPlan]:
        """Return the plan of a rank's writes, and its form for the main rank; arguments as of the base."""
        return lay_out(items, objects, find_other_keys(items.objects, shards), rank, files, self._hint)

    def make_index(
        self,
        plans: Sequence[LocalPlan],
        aliases: Mapping[str, str],  # noqa: ARG002 - empty: finds_aliases is off, since Megatron and DCP know no aliases
    ) -> StoredIndex:
        """Return the index of all ranks' plans; arguments as of the base."""
        return build_index(plans)

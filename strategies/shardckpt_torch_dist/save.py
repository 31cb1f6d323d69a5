"""Save as (torch_dist, 1): data files of each rank, DCP's ``.metadata``, Megatron's ``common.pt``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException
from shardckpt.parallel import assign_main_replicas
from shardckpt.storage import check_file_name, count_parallel_files
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave
from shardckpt_torch_dist.archive import make_loadable_archive
from shardckpt_torch_dist.plan import (
    GlobalFiles,
    LocalPlan,
    collect_items,
    lay_out,
    merge_plans,
    pack_plan,
    pickle_objects,
    view_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    import torch

    from shardckpt.distributed import Comm
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext
    from shardckpt_torch_dist.dialects import StoredIndex
    from shardckpt_torch_dist.plan import Source, WritePlan


#: Several files are faster than one only if each has at least this many bytes.
_MIN_FILE_BYTES = 32 << 20


class TorchDistSaveShardedStrategy(AsyncSaveStrategy):
    """Writes the dialect that Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint read.

    Args:
        backend: Must be ``torch_dist``; Megatron's callers pass it.
        version: Must be 1.
        keep_only_main_replica: Whether only the main replica of a shard may be written. If False, any rank with a copy
            may write it, and the bytes are balanced over all ranks.
        thread_count: Number of files per rank, balanced by bytes. By default one; on file systems known to write only
            through the page cache, as many as can be written concurrently, each of at least 32 MiB.
        cached_metadata: Accepted for Megatron's callers, without effect: saves of the same shards always reuse their
            plan (:mod:`shardckpt.engine.plan_cache`).
        separation_hint: Tensors and objects whose keys begin with it go to separate files,
            ``<hint>__<rank>_<n>.distcp``, which can be removed entirely.

    Example::

        dist_checkpointing.save(state, path, TorchDistSaveShardedStrategy(thread_count=4))
    """

    backend = "torch_dist"
    version = 1
    reader = "shardckpt 0.1, Megatron-Core 0.9, torch 2.6"
    caches_plan = True

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int | None = None,
        cached_metadata: bool = False,  # noqa: ARG002 - see the class
        separation_hint: str | None = None,
    ) -> None:
        if (backend, version) != (self.backend, self.version):
            raise CheckpointingException(
                f"{type(self).__qualname__} writes ('torch_dist', 1), not {(backend, version)}"
            )
        if thread_count is not None and thread_count < 1:
            raise CheckpointingException(f"thread_count={thread_count}: a rank writes at least one file")
        if separation_hint is not None:
            check_file_name(separation_hint)
        self._main_only = keep_only_main_replica
        self._files = thread_count
        self._hint = separation_hint

    @property
    def plan_cache_key(self) -> Hashable:
        """What the plan depends on, in addition to the shards: the class and its options."""
        return type(self), self._main_only, self._files, self._hint

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: plan with all ranks, and pickle the objects and the common state; no tensor is read yet.

        Args:
            shards: This rank's shards.
            common: The common state; the main rank's is stored.
            context: The ranks that save together, and what they save to.

        Returns:
            This rank's part of the save, to be written without other ranks.

        Raises:
            ShardingError: Ranks disagree on a tensor, its boxes do not fill it, or a value cannot be pickled.
            UnsafePickleError: A load would refuse an object.
        """
        comm = context.comm
        if not self._main_only:
            shards = assign_main_replicas(shards, comm)
        stored_common = _pickle_common(common, context)
        with comm.local_phase("planning"):
            items = collect_items(shards)
        with comm.local_phase("pickling objects"):
            archives = pickle_objects(items.objects, shards, context.allow_globals)
        with comm.local_phase("placing items in files"):
            nbytes = sum(tensor.nbytes for tensor in items.tensors)
            files = _file_count(self._files, nbytes, context.staging)
            layout = lay_out(items, archives, comm.rank, files, self._hint)
            rank_plan = pack_plan(items, layout)
        stored = _merge_on_main(rank_plan, comm)

        work = replace(layout.work, tensors=[], archives={}, stored=rank_plan.stored)
        plan = SavePlan(items.sources, items.objects, _lengths(archives), nbytes, files, work, stored)
        return plan.prepare(items.tensors, archives, stored_common, context)

    def replan(
        self, plan: SavePlan, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Collective: prepare a save by an earlier plan, for shards with the same metadata.

        Returns:
            The save; None on all ranks if the archive of an object has another size now, or another number of files is
            better.
        """
        comm = context.comm
        stored_common = _pickle_common(common, context)
        with comm.local_phase("pickling objects"):
            archives = pickle_objects(plan.objects, shards, context.allow_globals)
            files = _file_count(self._files, plan.nbytes, context.staging)
        if not comm.all_true(_lengths(archives) == plan.lengths and files == plan.files):
            return None
        return plan.prepare(view_tensors(plan.sources, shards), archives, stored_common, context)


class SavePlan(NamedTuple):
    """A rank's part of a plan, for saves of shards with the same metadata.

    Attributes:
        sources: Where the values of each box come from.
        objects: The positions of the ShardedObjects among the rank's shards, by unique key.
        lengths: The sizes of their archives, in bytes, by unique key.
        nbytes: The size of all tensors, in bytes.
        files: The number of files.
        work: The write plan without values.
        stored: What all ranks store; None except on the main rank.
    """

    sources: list[Source]
    objects: dict[str, int]
    lengths: dict[str, int]
    nbytes: int
    files: int
    work: WritePlan
    stored: StoredIndex | None

    def prepare(
        self, tensors: list[torch.Tensor], archives: dict[str, bytes], stored_common: bytes, context: PlanContext
    ) -> PreparedSave:
        """Return a save of these values by this plan; needs no other rank."""
        global_files = None if self.stored is None else GlobalFiles(self.stored, context.save_id, stored_common)
        return PreparedSave(
            replace(self.work, tensors=tensors, archives=archives, global_files=global_files), plan=self
        )


def _file_count(asked: int | None, nbytes: int, directory: Path | None) -> int:
    """Return the number of files that the caller asked for, or that is fastest for so many bytes in a directory."""
    most = nbytes // _MIN_FILE_BYTES
    return asked or (1 if most <= 1 or directory is None else min(most, count_parallel_files(directory)))


def _lengths(archives: dict[str, bytes]) -> dict[str, int]:
    return {key: len(archive) for key, archive in archives.items()}


def _pickle_common(common: CommonStateDict, context: PlanContext) -> bytes:
    """Pickle the common state on the main rank; the others return empty bytes. Needs no other rank."""
    with context.comm.local_phase("pickling the common state"):
        return make_loadable_archive(common, "the common state", context.allow_globals) if context.comm.is_main else b""


def _merge_on_main(rank_plan: LocalPlan, comm: Comm) -> StoredIndex | None:
    """Collective: merge the plans of all ranks on the main rank; the others return None."""
    plans = comm.gather(rank_plan)
    plan = None
    with comm.local_phase("planning for all ranks"):
        if comm.is_main:
            plan = merge_plans(plans)
    return plan


__all__ = ["TorchDistSaveShardedStrategy"]

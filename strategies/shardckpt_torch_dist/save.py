"""Saving as (torch_dist, 1): data files of every rank, DCP's ``.metadata``, Megatron's ``common.pt``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException
from shardckpt.parallel import assign_main_replicas
from shardckpt.storage import check_file_name, side_by_side
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave
from shardckpt_torch_dist.archive import pickled
from shardckpt_torch_dist.plan import LocalPlan, Names, archives_of, local_items, local_plan, merged, place, tensors_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    import torch

    from shardckpt.distributed import Comm
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext
    from shardckpt_torch_dist.dialects import StoredIndex
    from shardckpt_torch_dist.plan import SaveWork, Source


#: Bytes from which on a file of its own is worth it where it is written faster.
_WORTH_A_FILE = 32 << 20


class TorchDistSaveShardedStrategy(AsyncSaveStrategy):
    """Writes the dialect that Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint read.

    Args:
        backend: Must be ``torch_dist``: Megatron's callers name it.
        version: Must be 1.
        keep_only_main_replica: Write the main replicas; False lets any holder of a copy write it, balanced by bytes
            over all ranks.
        thread_count: Files a rank, filled evenly. By default one; on a file system that is known to write through the
            page cache alone, as many as can be written at a time, of 32 MiB at least.
        cached_metadata: Accepted for Megatron's callers, without effect: saves of the same shards use their plan again
            without being told (:mod:`shardckpt.engine.plan_cache`).
        separation_hint: Tensors and objects whose keys begin with it go to files of their own,
            ``<hint>__<rank>_<n>.distcp``, which can be removed as a whole.
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
        """All that the plan depends on besides the shards."""
        return type(self), self._main_only, self._files, self._hint

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Plan together; objects and the common state are pickled here."""
        comm = context.comm
        if not self._main_only:
            shards = assign_main_replicas(shards, comm)
        stored_common = _common(common, context)
        with comm.local_phase("planning"):
            items = local_items(shards)
        with comm.local_phase("pickling objects"):
            archives = archives_of(items.objects, shards, context.allow_globals)
        with comm.local_phase("placing items in files"):
            nbytes = sum(tensor.nbytes for tensor in items.tensors)
            files = _file_count(self._files, nbytes, context.staging)
            placed = place(items, archives, comm.rank, files, self._hint)
            local = local_plan(items, placed)
        stored = _global_plan(local, comm)

        work = replace(placed.work, tensors=[], archives={}, stored=local.stored)
        plan = SavePlan(items.sources, items.objects, _lengths(archives), nbytes, files, work, stored)
        return plan.prepare(items.tensors, archives, stored_common, context)

    def replan(
        self, plan: SavePlan, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Plan by an earlier plan; None if an object is longer or shorter now, or another number of files better."""
        comm = context.comm
        stored_common = _common(common, context)
        with comm.local_phase("pickling objects"):
            archives = archives_of(plan.objects, shards, context.allow_globals)
            files = _file_count(self._files, plan.nbytes, context.staging)
        if not comm.all_true(_lengths(archives) == plan.lengths and files == plan.files):
            return None
        return plan.prepare(tensors_of(plan.sources, shards), archives, stored_common, context)


class SavePlan(NamedTuple):
    """A rank's part of a plan, for saves of shards with the same metadata.

    Attributes:
        sources: Where its tensors come from.
        objects: The shards that are objects, by unique key.
        lengths: Of their archives, in bytes.
        nbytes: Of the tensors.
        files: How many they go to.
        work: What to write, without values.
        stored: On the main rank, what all ranks store.
    """

    sources: list[Source]
    objects: dict[str, int]
    lengths: dict[str, int]
    nbytes: int
    files: int
    work: SaveWork
    stored: StoredIndex | None

    def prepare(
        self, tensors: list[torch.Tensor], archives: dict[str, bytes], stored_common: bytes, context: PlanContext
    ) -> PreparedSave:
        """Return a save of these values by this plan."""
        names = None if self.stored is None else Names(self.stored, context.save_id, stored_common)
        return PreparedSave(replace(self.work, tensors=tensors, archives=archives, names=names), plan=self)


def _file_count(asked: int | None, nbytes: int, directory: Path | None) -> int:
    """How many files a caller wants, or into how many so many bytes are written fastest."""
    most = nbytes // _WORTH_A_FILE
    return asked or (1 if most <= 1 or directory is None else min(most, side_by_side(directory)))


def _lengths(archives: dict[str, bytes]) -> dict[str, int]:
    return {key: len(archive) for key, archive in archives.items()}


def _common(common: CommonStateDict, context: PlanContext) -> bytes:
    """The common state's file, on the main rank."""
    with context.comm.local_phase("pickling the common state"):
        return pickled(common, "the common state", context.allow_globals) if context.comm.is_main else b""


def _global_plan(local: LocalPlan, comm: Comm) -> StoredIndex | None:
    """What all ranks store, on the main rank."""
    plans = comm.gather(local)
    plan = None
    with comm.local_phase("planning for all ranks"):
        if comm.is_main:
            plan = merged(plans)
    return plan


__all__ = ["TorchDistSaveShardedStrategy"]

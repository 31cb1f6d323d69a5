"""Save as (torch_dist, 1): data files of each rank, DCP's ``.metadata``, Megatron's ``common.pt``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.archive import encode_object
from shardckpt.chunks import collect_items, count_files, view_tensors
from shardckpt.errors import CheckpointingException
from shardckpt.manifest import is_file_name
from shardckpt.parallel import assign_main_replicas
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave
from shardckpt_torch_dist.plan import (
    GlobalFiles,
    build_index,
    find_other_keys,
    lay_out,
    pickle_objects,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from shardckpt.chunks import Source
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext
    from shardckpt_torch_dist.dialects import StoredIndex
    from shardckpt_torch_dist.plan import WritePlan


class TorchDistSaveShardedStrategy(AsyncSaveStrategy):
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

    Example::

        dist_checkpointing.save(state, path, TorchDistSaveShardedStrategy(thread_count=4))
    """

    backend = "torch_dist"
    version = 1
    reader = "shardckpt 0.1, Megatron-Core 0.9, torch 2.6"
    caches_plan = True
    stores_plain_objects = True

    def __init__(
        self,
        backend: str | None = None,
        version: int | None = None,
        keep_only_main_replica: bool = True,
        thread_count: int | None = None,
        cached_metadata: bool = False,  # noqa: ARG002 - see the class
        separation_hint: str | None = None,
    ) -> None:
        own = self.backend, self.version
        asked = backend or self.backend, self.version if version is None else version
        if asked != own:
            raise CheckpointingException(f"{type(self).__qualname__} writes {own}, not {asked}")
        if thread_count is not None and thread_count < 1:
            raise CheckpointingException(f"thread_count={thread_count}: a rank writes at least one file")
        if separation_hint is not None:
            _check_hint(separation_hint)
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
        with comm.local_phase("assigning items to files"):
            nbytes = sum(tensor.nbytes for tensor in items.tensors)
            files = count_files(self._files, nbytes, context.staging)
            other_keys = find_other_keys(items.objects, shards)
            write_plan, local_plan = lay_out(items, archives, other_keys, comm.rank, files, self._hint)
        plans = comm.gather(local_plan)
        with comm.local_phase("planning for all ranks"):
            index = build_index(plans) if comm.is_main else None

        # The plan is kept for later saves, so it holds no values: a cached plan must not keep a model in memory.
        write_plan = replace(write_plan, tensors=[], archives={})
        plan = SavePlan(items.sources, items.objects, _lengths(archives), nbytes, files, write_plan, index)
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
            files = count_files(self._files, plan.nbytes, context.staging)
        # An archive of another size would move all that is behind it in the file.
        if not comm.all_true(_lengths(archives) == plan.lengths and files == plan.files):
            return None
        return plan.prepare(view_tensors(plan.sources, shards), archives, stored_common, context)


def _check_hint(hint: str) -> None:
    """Raise unless names of files can begin with the separation hint."""
    if not is_file_name(hint) or "/" in hint:
        raise CheckpointingException(
            f"separation_hint={hint!r}: names of files begin with it, so it has letters, digits, '.', '_' and '-' only"
        )


class SavePlan(NamedTuple):
    """A rank's part of a plan, for saves of shards with the same metadata.

    Attributes:
        sources: Where the values of each box come from.
        objects: The positions of the ShardedObjects among the rank's shards, by unique key.
        lengths: The sizes of their archives, in bytes, by unique key.
        nbytes: The size of all tensors, in bytes.
        files: The number of files.
        write_plan: The write plan without values.
        stored_index: What all ranks store; None except on the main rank.
    """

    sources: list[Source]
    objects: dict[str, int]
    lengths: dict[str, int]
    nbytes: int
    files: int
    write_plan: WritePlan
    stored_index: StoredIndex | None

    def prepare(
        self, tensors: list[torch.Tensor], archives: dict[str, bytes], stored_common: bytes, context: PlanContext
    ) -> PreparedSave:
        """Return a save of these values by this plan; needs no other rank."""
        index = self.stored_index
        global_files = None if index is None else GlobalFiles(index, context.save_id, stored_common)
        work = replace(self.write_plan, tensors=tensors, archives=archives, global_files=global_files)
        return PreparedSave(work, plan=self)


def _lengths(archives: dict[str, bytes]) -> dict[str, int]:
    return {key: len(archive) for key, archive in archives.items()}


def _pickle_common(common: CommonStateDict, context: PlanContext) -> bytes:
    """Pickle the common state on the main rank; the others return empty bytes. Needs no other rank."""
    with context.comm.local_phase("pickling the common state"):
        return encode_object(common, "the common state", context.allow_globals) if context.comm.is_main else b""

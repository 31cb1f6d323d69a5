"""Save as (safetensors, 1): data files of each rank; the index and the common state by the main rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.chunks import collect_items, count_files, merge_plans, view_tensors
from shardckpt.errors import CheckpointingException
from shardckpt.parallel import assign_main_replicas
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave
from shardckpt_safetensors.layout import lay_out
from shardckpt_safetensors.objects import encode_object, encode_tree_file
from shardckpt_safetensors.write_plan import GlobalFiles, Payload

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from typing import Any

    import torch

    from shardckpt.chunks import MergedPlan, Source
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext
    from shardckpt_safetensors.write_plan import WritePlan


class SafetensorsSaveShardedStrategy(AsyncSaveStrategy):
    """Writes safetensors files and an index of columns; objects and common state as JSON and tensors, never as pickles.

    Args:
        keep_only_main_replica: Whether only the main replica of a shard may be written. If False, any rank with a copy
            may write it, and the bytes are balanced over all ranks.
        thread_count: Number of files per rank, balanced by bytes. By default one; on file systems known to write only
            through the page cache, as many as can be written concurrently, each of at least 32 MiB.

    Example::

        dist_checkpointing.save(state, path, SafetensorsSaveShardedStrategy())
    """

    backend = "safetensors"
    version = 1
    reader = "shardckpt 0.1"
    caches_plan = True

    def __init__(self, *, keep_only_main_replica: bool = True, thread_count: int | None = None) -> None:
        if thread_count is not None and thread_count < 1:
            raise CheckpointingException(f"thread_count={thread_count}: a rank writes at least one file")
        self._main_only = keep_only_main_replica
        self._files = thread_count

    @property
    def plan_cache_key(self) -> Hashable:
        """What the plan depends on, in addition to the shards: the class and its options."""
        return type(self), self._main_only, self._files

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: plan with all ranks, and encode the objects and the common state; no tensor is read yet.

        Args:
            shards: This rank's shards.
            common: The common state; the main rank's is stored.
            context: The ranks that save together, and what they save to.

        Returns:
            This rank's part of the save, to be written without other ranks.

        Raises:
            ShardingError: Ranks disagree on a tensor, its boxes do not fill it, or the format cannot hold a key, a
                dtype or a value.
        """
        comm = context.comm
        if not self._main_only:
            shards = assign_main_replicas(shards, comm)
        stored_common = _encode_common(common, context)
        with comm.local_phase("planning"):
            items = collect_items(shards)
        with comm.local_phase("encoding objects"):
            objects = _encode_objects(items.objects, shards)
        with comm.local_phase("assigning items to files"):
            nbytes = sum(tensor.nbytes for tensor in items.tensors)
            files = count_files(self._files, nbytes, context.staging)
            write_plan, local_plan = lay_out(items, objects, comm.rank, files)
        plans = comm.gather(local_plan)
        with comm.local_phase("planning for all ranks"):
            merged = merge_plans(plans) if comm.is_main else None

        # The plan is kept for later saves, so it holds no values: a cached plan must not keep a model in memory.
        write_plan = replace(write_plan, tensors=[], objects={})
        plan = SavePlan(items.sources, items.objects, _sizes(objects), nbytes, files, write_plan, merged)
        return plan.prepare(items.tensors, objects, stored_common, context)

    def replan(
        self, plan: SavePlan, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Collective: prepare a save by an earlier plan, for shards with the same metadata.

        Returns:
            The save; None on all ranks if the payload of an object has another size or codec now, or another number of
            files is better.
        """
        comm = context.comm
        stored_common = _encode_common(common, context)
        with comm.local_phase("encoding objects"):
            objects = _encode_objects(plan.objects, shards)
            files = count_files(self._files, plan.nbytes, context.staging)
        # A payload of another size would move all that is behind it in the file.
        if not comm.all_true(_sizes(objects) == plan.sizes and files == plan.files):
            return None
        return plan.prepare(view_tensors(plan.sources, shards), objects, stored_common, context)


class SavePlan(NamedTuple):
    """A rank's part of a plan, for saves of shards with the same metadata.

    Attributes:
        sources: Where the values of each box come from.
        objects: The positions of the ShardedObjects among the rank's shards, by unique key.
        sizes: Codec and bytes of their payloads, by unique key.
        nbytes: The size of all tensors, in bytes.
        files: The number of files.
        write_plan: The write plan without values.
        merged: What all ranks store; None except on the main rank.
    """

    sources: list[Source]
    objects: dict[str, int]
    sizes: dict[str, tuple[str, int]]
    nbytes: int
    files: int
    write_plan: WritePlan
    merged: MergedPlan | None

    def prepare(
        self,
        tensors: list[torch.Tensor],
        objects: dict[str, Payload],
        stored_common: bytes,
        context: PlanContext,
    ) -> PreparedSave:
        """Return a save of these values by this plan; needs no other rank."""
        global_files = None if self.merged is None else GlobalFiles(self.merged, context.save_id, stored_common)
        work = replace(self.write_plan, tensors=tensors, objects=objects, global_files=global_files)
        return PreparedSave(work, plan=self)


def _encode_objects(objects: Mapping[str, int], shards: Sequence[Any]) -> dict[str, Payload]:
    """Return the payloads of a rank's objects, by unique key."""
    return {key: Payload(*encode_object(shards[n].data, f"object {key!r}")) for key, n in objects.items()}


def _encode_common(common: CommonStateDict, context: PlanContext) -> bytes:
    """Encode the common state on the main rank; the others return empty bytes. Needs no other rank."""
    with context.comm.local_phase("encoding the common state"):
        return encode_tree_file(common, "the common state") if context.comm.is_main else b""


def _sizes(objects: Mapping[str, Payload]) -> dict[str, tuple[str, int]]:
    return {key: (payload.codec, len(payload.data)) for key, payload in objects.items()}

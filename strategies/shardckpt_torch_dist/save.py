"""Saving as (torch_dist, 1): data files of every rank, DCP's ``.metadata``, Megatron's ``common.pt``."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType

from shardckpt.errors import CheckpointingException
from shardckpt.parallel import share_out
from shardckpt.planning.balance import deal
from shardckpt.storage.filesystem import check_file_name
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave
from shardckpt_torch_dist.dialects import METADATA_FILE
from shardckpt_torch_dist.pickled import check_loadable, pickled
from shardckpt_torch_dist.plan_cache import GlobalPlan, PlanCache
from shardckpt_torch_dist.save_planner import ShardedSavePlanner
from shardckpt_torch_dist.stored import COMMON_FILE
from shardckpt_torch_dist.torch_private import StorageInfo
from shardckpt_torch_dist.work import Place, PlannedFile, SaveWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import WriteItem

    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext, SaveContext


class TorchDistSaveShardedStrategy(AsyncSaveStrategy):
    """Writes the dialect that Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint read.

    Args:
        backend: Must be ``torch_dist``: Megatron's callers name it.
        version: Must be 1.
        keep_only_main_replica: Write the main replicas; False lets any holder of a copy write it, dealt out by bytes
            over all ranks.
        thread_count: Files a rank, filled evenly.
        cached_metadata: Use the global plan of the last save with this instance again, as long as no rank's items
            change: for jobs that keep the strategy from save to save.
        separation_hint: Tensors and objects whose keys begin with it go to files of their own,
            ``<hint>__<rank>_<n>.distcp``, which can be removed as a whole.
    """

    backend = "torch_dist"
    version = 1
    reader = "shardckpt 0.1, Megatron-Core 0.9, torch 2.6"

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 1,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
    ) -> None:
        if (backend, version) != (self.backend, self.version):
            raise CheckpointingException(
                f"{type(self).__qualname__} writes ('torch_dist', 1), not {(backend, version)}"
            )
        if thread_count < 1:
            raise CheckpointingException(f"thread_count={thread_count}: a rank writes at least one file")
        if separation_hint is not None:
            check_file_name(separation_hint)
        self._main_only = keep_only_main_replica
        self._files = thread_count
        self._hint = separation_hint
        #: Makes the global plans.
        self.plans = PlanCache(reuse=cached_metadata)

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Plan together; objects and the common state are pickled here."""
        comm = context.comm
        if not self._main_only:
            shards = share_out(shards, comm)
        planner = ShardedSavePlanner(flatten_state_dict=False)
        with comm.phase("pickling the common state"):
            stored_common = pickled(common, "the common state", context.allow_globals) if comm.is_main else b""
        with comm.phase("planning"):
            leaves = {str(number): shard for number, shard in enumerate(shards)}
            planner.set_up_planner(leaves, is_coordinator=comm.is_main)
            local = planner.create_local_plan()
        plan = self.plans.global_plan(planner, local, comm)
        with comm.phase("pickling objects"):
            work = self._work(planner, local.items, context)

        def finish(results: Sequence[list[Place]], saving: SaveContext) -> None:
            with saving.comm.phase("writing metadata"):
                if saving.comm.is_main:
                    _write_metadata(plan, results, saving)
                    saving.writer.write(COMMON_FILE, stored_common)

        return PreparedSave(work, finish)

    def _work(self, planner: ShardedSavePlanner, items: Sequence[WriteItem], context: PlanContext) -> SaveWork:
        """This rank's items, dealt out to files by bytes; those of the hint to files of their own."""
        files: list[PlannedFile] = []
        work = SaveWork(files, [], [])
        for prefix, numbers in self._groups(items):
            buckets = [PlannedFile(f"{prefix}__{context.comm.rank}_{n}.distcp") for n in range(self._files)]
            sizes = [_nbytes(items[number]) for number in numbers]
            chosen = deal([tuple(range(self._files))] * len(numbers), sizes)
            for number, bucket in zip(numbers, chosen, strict=True):
                _plan_item(number, items[number], buckets[bucket], work, planner, context.allow_globals)
            files += [file for file in buckets if file.objects or file.tensors]
        return work

    def _groups(self, items: Sequence[WriteItem]) -> list[tuple[str, list[int]]]:
        """Prefixes of file names, and the numbers of the items that go there."""
        everything = range(len(items))
        hint = self._hint
        if not hint:
            return [("", list(everything))]
        hinted = [number for number in everything if items[number].index.fqn.startswith(hint)]
        return [(hint, hinted), ("", sorted(set(everything).difference(hinted)))]


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return int(item.tensor_data.chunk.sizes.numel()) * int(item.tensor_data.properties.dtype.itemsize)


def _plan_item(
    number: int,
    item: WriteItem,
    file: PlannedFile,
    work: SaveWork,
    planner: ShardedSavePlanner,
    allow_globals: Iterable[Any],
) -> None:
    data: Any = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        check_loadable(data, f"object {item.index.fqn!r}", allow_globals)
        file.objects.append((number, data.getvalue()))
    else:
        file.tensors.append((number, len(work.tensors)))
        work.tensors.append(data)
        work.keys.append(item.index.fqn)


def _write_metadata(plan: GlobalPlan, places: Sequence[list[Place]], context: SaveContext) -> None:
    metadata = Metadata(
        plan.metadata.state_dict_metadata,
        storage_data={
            index: StorageInfo(place.file, place.offset, place.length)
            for indices, part in zip(plan.items, places, strict=True)
            for index, place in zip(indices, part, strict=True)
        },
        storage_meta=StorageMeta(save_id=context.save_id),
    )
    context.writer.write(METADATA_FILE, pickle.dumps(metadata, protocol=4), keys=0)


__all__ = ["TorchDistSaveShardedStrategy"]

"""Saving as (torch_dist, 1): one data file a rank, DCP's ``.metadata``, Megatron's ``common.pt``."""

from __future__ import annotations

import io
import logging
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from shardckpt.errors import UnsafePickleError
from shardckpt.storage.memory import plain_cpu, tensor_bytes
from shardckpt.strategy import SaveStrategy
from shardckpt_torch_dist.archive import load_bytes
from shardckpt_torch_dist.dialects import METADATA_FILE
from shardckpt_torch_dist.envelope import envelope
from shardckpt_torch_dist.save_planner import ShardedSavePlanner
from shardckpt_torch_dist.stored import COMMON_FILE
from shardckpt_torch_dist.torch_private import StorageInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.storage.writer import FileWriter
    from shardckpt.strategy import SaveContext

logger = logging.getLogger(__name__)

#: Larger objects are not read back to see whether a load would refuse them.
_CHECKED_BYTES = 16 << 20

_Places = list[tuple[MetadataIndex, StorageInfo]]


class TorchDistSaveShardedStrategy(SaveStrategy):
    """Writes the dialect that Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint read."""

    backend = "torch_dist"
    version = 1
    reader = "shardckpt 0.1, Megatron-Core 0.9, torch 2.6"
    writes = "what Megatron-Core 0.9 to 0.20 and plain DCP read"

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Plan together, write each rank's items, and let the main rank write what names them."""
        comm = context.comm
        planner = ShardedSavePlanner(flatten_state_dict=False)
        with comm.phase("planning"):
            leaves = {str(number): shard for number, shard in enumerate(shards)}
            planner.set_up_planner(leaves, is_coordinator=comm.is_main)
            plan = planner.create_local_plan()
        plans = comm.gather(plan)
        metadata = Metadata({})
        with comm.phase("planning for all ranks"):
            if comm.is_main:
                _, metadata = planner.create_global_plan(plans)
        with comm.phase("writing shards"):
            places = _write_items(planner, plan.items, context)
        everyone = comm.gather(places)
        with comm.phase("writing metadata"):
            if comm.is_main:
                _write_metadata(metadata, everyone, common, context)


def _write_items(planner: ShardedSavePlanner, items: Sequence[WriteItem], context: SaveContext) -> _Places:
    """Write this rank's items into one file, objects first as Megatron does, and say where each is."""
    if not items:
        return []
    name = f"__{context.comm.rank}_0.distcp"
    file = context.writer.create(name)
    places: _Places = []
    for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
        start = file.position
        append = _append_object if item.type == WriteItemType.BYTE_IO else _append_tensor
        append(file, item, planner.resolve_data(item))
        places.append((item.index, StorageInfo(name, start, file.position - start)))
    context.writer.finish(file)
    return places


def _append_object(file: FileWriter, item: WriteItem, data: Any) -> None:
    view = data.getbuffer()
    _warn_if_refused(view, f"object {item.index.fqn!r}")
    file.append(view.nbytes, lambda: [view])


def _append_tensor(file: FileWriter, _item: WriteItem, tensor: Any) -> None:
    head, tail = envelope(tensor.dtype, tuple(tensor.shape), file.position)
    nbytes = len(head) + tensor.numel() * tensor.element_size() + len(tail)
    file.append(nbytes, lambda: [memoryview(head), tensor_bytes(plain_cpu(tensor)), memoryview(tail)])


def _write_metadata(
    metadata: Metadata, everyone: Sequence[_Places], common: CommonStateDict, context: SaveContext
) -> None:
    metadata.storage_data = {index: info for places in everyone for index, info in places}
    metadata.storage_meta = StorageMeta(save_id=context.save_id)
    context.writer.write(METADATA_FILE, pickle.dumps(metadata, protocol=4), keys=0)
    file = io.BytesIO()
    torch.save(common, file)
    _warn_if_refused(file.getbuffer(), "the common state")
    context.writer.write(COMMON_FILE, file.getvalue())


def _warn_if_refused(archive: memoryview, what: str) -> None:
    """Say at the save what a load would only say then: that it holds a class outside the allow-list."""
    if archive.nbytes > _CHECKED_BYTES:
        return
    try:
        load_bytes(bytes(archive), what)
    except UnsafePickleError as exc:
        logger.warning("saved as it is, and a load will refuse it: %s", exc)


__all__ = ["TorchDistSaveShardedStrategy"]

"""Saving as (torch_dist, 1): one data file a rank, DCP's ``.metadata``, Megatron's ``common.pt``."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.storage.memory import plain_cpu, synchronize_devices, tensor_bytes
from shardckpt.strategy import SaveStrategy
from shardckpt_torch_dist.dialects import METADATA_FILE
from shardckpt_torch_dist.envelope import envelope
from shardckpt_torch_dist.pickled import check_loadable, pickled
from shardckpt_torch_dist.save_planner import ShardedSavePlanner
from shardckpt_torch_dist.stored import COMMON_FILE
from shardckpt_torch_dist.torch_private import StorageInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.storage.writer import FileWriter
    from shardckpt.strategy import SaveContext

_Places = list[tuple[MetadataIndex, StorageInfo]]


class TorchDistSaveShardedStrategy(SaveStrategy):
    """Writes the dialect that Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint read."""

    backend = "torch_dist"
    version = 1
    reader = "shardckpt 0.1, Megatron-Core 0.9, torch 2.6"

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Plan together, write each rank's items, and let the main rank write what names them."""
        comm = context.comm
        planner = ShardedSavePlanner(flatten_state_dict=False)
        with comm.phase("pickling the common state"):
            stored_common = pickled(common, "the common state", context.allow_globals) if comm.is_main else b""
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
            synchronize_devices(s.data for s in shards if isinstance(s, ShardedTensor) and s.data is not None)
            places = _write_items(planner, plan.items, context)
        everyone = comm.gather(places)
        with comm.phase("writing metadata"):
            if comm.is_main:
                _write_metadata(metadata, everyone, context)
                context.writer.write(COMMON_FILE, stored_common)


def _write_items(planner: ShardedSavePlanner, items: Sequence[WriteItem], context: SaveContext) -> _Places:
    """Write this rank's items into one file, objects first as Megatron does, and say where each is."""
    if not items:
        return []
    name = f"__{context.comm.rank}_0.distcp"
    file = context.writer.create(name)
    places: _Places = []
    for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
        start = file.position
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            _append_object(file, data, f"object {item.index.fqn!r}", context.allow_globals)
        else:
            _append_tensor(file, data, item.index.fqn)
        places.append((item.index, StorageInfo(name, start, file.position - start)))
    context.writer.finish(file)
    return places


def _append_object(file: FileWriter, data: Any, what: str, allow_globals: Iterable[Any]) -> None:
    check_loadable(data, what, allow_globals)
    view = data.getbuffer()
    file.append(view.nbytes, lambda: [view])


def _append_tensor(file: FileWriter, tensor: Any, key: str) -> None:
    head, tail = envelope(tensor.dtype, tuple(tensor.shape), file.position)
    nbytes = len(head) + tensor.numel() * tensor.element_size() + len(tail)

    def produce() -> list[memoryview]:
        try:
            values = plain_cpu(tensor)
        except CheckpointingException as exc:
            raise ShardingError(f"tensor {key!r}: {exc}") from exc
        return [memoryview(head), tensor_bytes(values), memoryview(tail)]

    file.append(nbytes, produce)


def _write_metadata(metadata: Metadata, everyone: Sequence[_Places], context: SaveContext) -> None:
    metadata.storage_data = {index: info for places in everyone for index, info in places}
    metadata.storage_meta = StorageMeta(save_id=context.save_id)
    context.writer.write(METADATA_FILE, pickle.dumps(metadata, protocol=4), keys=0)


__all__ = ["TorchDistSaveShardedStrategy"]

"""A save planner for plain ``dcp.save`` that understands ShardedTensors and ShardedObjects."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import FlatPart, part_view, shard_parts
from shardckpt_torch_dist.archive import make_archive
from shardckpt_torch_dist.dialects import COMMON_KEY
from shardckpt_torch_dist.plan.split import split_shards

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.metadata import StorageMeta


class ShardedSavePlanner(DefaultSavePlanner):
    """Plans the main replicas of ShardedTensors and ShardedObjects by their keys, and other leaves as DCP does.

    A flattened shard is planned as the boxes that it consists of, so that every reader finds its true global shape.

    Args:
        *args: As for DCP's DefaultSavePlanner.
        **kwargs: As for DCP's DefaultSavePlanner.

    Example::

        dcp.save(state, storage_writer=CheckpointStorageWriter(path), planner=ShardedSavePlanner())
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tensors: list[ShardedTensor] = []
        self._objects: list[ShardedObject] = []
        self._views: dict[MetadataIndex, tuple[ShardedTensor, FlatPart]] = {}
        self._values: dict[MetadataIndex, ShardedObject] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Split the state dict; see :class:`torch.distributed.checkpoint.SavePlanner`."""
        self._tensors, self._objects, rest = split_shards(state_dict)
        super().set_up_planner(rest, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan: an item for each box of a main replica, for each main object, then DCP's own.

        Raises:
            ShardingError: A tensor has no data, or an object has the name of the common state.
        """
        self._views.clear()
        self._values.clear()
        plan = super().create_local_plan()
        items = [
            item for shard in self._tensors if is_main_replica(shard.replica_id) for item in self._write_items(shard)
        ]
        for shard in self._objects:
            if is_main_replica(shard.replica_id):
                index = MetadataIndex(shard.unique_key)
                if shard.unique_key == COMMON_KEY:
                    raise ShardingError(f"object {shard.key!r}: the common state has that name; use another key")
                self._values[index] = shard
                items.append(WriteItem(index, WriteItemType.BYTE_IO))
        self.plan = dataclasses.replace(plan, items=[*items, *plan.items])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the values of an item: a view of the tensor, or an archive of the object."""
        if write_item.index in self._views:
            return part_view(*self._views[write_item.index])
        if write_item.index in self._values:
            return make_archive([self._values[write_item.index].data], f"object {write_item.index.fqn!r}")
        return super().resolve_data(write_item)

    def _write_items(self, shard: ShardedTensor) -> list[WriteItem]:
        if shard.data is None:
            raise ShardingError(f"ShardedTensor {shard.key!r} has no data to save")
        empty = 0 in shard.global_shape
        items = []
        for part in shard_parts(shard):
            if part.box.volume or empty:
                index = MetadataIndex(shard.key, torch.Size(part.box.offset))
                self._views[index] = (shard, part)
                items.append(_write_item(index, shard, part))
        return items


def _write_item(index: MetadataIndex, shard: ShardedTensor, part: FlatPart) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.shape)),
            properties=TensorProperties(dtype=shard.dtype),
            size=torch.Size(shard.global_shape),
        ),
    )


__all__ = ["ShardedSavePlanner"]

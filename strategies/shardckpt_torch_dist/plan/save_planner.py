"""A save planner for plain ``dcp.save`` that understands ShardedTensors and ShardedObjects."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardckpt.archive import make_archive
from shardckpt.chunks import collect_items
from shardckpt.distributed import Comm  # noqa: F401 - DCP then keeps no process group: see tensors.torch_private
from shardckpt_torch_dist.plan.objects import check_keys, find_other_keys, get_stored_value
from shardckpt_torch_dist.plan.split import split_shards

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import StorageMeta

    from shardckpt.chunks import LocalItems
    from shardckpt.mapping import ShardedObject, ShardedTensor


class ShardedSavePlanner(DefaultSavePlanner):
    """Plans the main replicas of ShardedTensors and ShardedObjects by their keys, and other leaves as DCP does.

    A flattened shard is planned as the boxes that it consists of, so that every reader finds its true global shape.

    Its arguments are DCP's DefaultSavePlanner's.

    Example::

        dcp.save(state, storage_writer=CheckpointStorageWriter(path), planner=ShardedSavePlanner())
    """

    _shards: list[ShardedTensor | ShardedObject]
    #: The values of our items: a view of the tensor, or the object.
    _values: dict[MetadataIndex, torch.Tensor | ShardedTensor | ShardedObject]

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Split the state dict; see :class:`torch.distributed.checkpoint.SavePlanner`."""
        tensors, objects, rest = split_shards(state_dict)
        self._shards = [*tensors, *objects]
        self._values = {}
        super().set_up_planner(rest, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan: an item for each box of a main replica, for each main object, then DCP's own.

        Raises:
            ShardingError: A tensor has no data, or an object has the name of the common state.
        """
        plan = super().create_local_plan()
        mine = collect_items(self._shards)
        check_keys(mine.objects, self._shards)
        other_keys = find_other_keys(mine.objects, self._shards)
        # boxes of an empty tensor may have one offset: the first stands for all, as in a merge of plans
        found: dict[MetadataIndex, WriteItem] = {}
        self._values = {}
        for position, tensor in enumerate(mine.tensors):
            item = _tensor_item(mine, position)
            if found.setdefault(item.index, item) is item:
                self._values[item.index] = tensor
        items = [*found.values()]
        for key, position in mine.objects.items():
            # DCP plans an archive for each key: an object for other readers is stored under the first of its keys
            index = MetadataIndex(other_keys.get(key, (key,))[0])
            items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self._values[index] = self._shards[position]
        self.plan = dataclasses.replace(plan, items=[*items, *plan.items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of one of our items: a view of the tensor, or an archive of the object; others as DCP."""
        value = self._values.get(index)
        if value is None:
            return super().lookup_object(index)
        if isinstance(value, torch.Tensor):
            # torch's copy_ to float16 loses the signs of a view with the neg bit: readers that cast would, too
            return value.resolve_conj().resolve_neg()
        return make_archive(get_stored_value(value), f"object {index.fqn!r}")

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's name
        """Return our items as :meth:`lookup_object` found them, and pickle the objects of others."""
        return object if write_item.index in self._values else super().transform_object(write_item, object)


def _tensor_item(items: LocalItems, position: int) -> WriteItem:
    """Return DCP's item for the box at a position among a rank's boxes."""
    boxes = items.boxes
    number, offset = boxes.spec[position], torch.Size(boxes.offsets[position])
    return WriteItem(
        index=MetadataIndex(items.keys[number], offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, torch.Size(boxes.extents[position])),
            properties=TensorProperties(dtype=items.dtypes[number]),
            size=torch.Size(items.shapes[number]),
        ),
    )

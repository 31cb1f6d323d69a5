"""What a rank reads, planned: tensors by columns, and what needs more care by the planner that DCP knows too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.tensors import is_quantized, synchronize_devices
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner, check_cast
from shardckpt_torch_dist.plan.reads import Reads
from shardckpt_torch_dist.plan.requested import WantedTensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import LoadPlan as ItemPlan

    from shardckpt.mapping import ShardedBase
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import StoredIndex, StoredTensor


class LoadPlan:
    """The reads of one rank.

    Args:
        wanted: Its shards.
        index: What is stored.
        reader: The checkpoint's files.
        allow_globals: Classes and functions that objects may name.

    Raises:
        CheckpointingException: what is wanted is not stored so, or what is stored contradicts itself.
    """

    def __init__(
        self,
        wanted: Sequence[ShardedBase],
        index: StoredIndex,
        reader: CheckpointReader,
        allow_globals: tuple[Any, ...],
    ) -> None:
        self._index = index
        self._reader = reader
        simple: list[ShardedTensor] = []
        others: list[ShardedBase] = []
        for shard in wanted:
            if isinstance(shard, ShardedTensor) and _is_simple(shard, index):
                simple.append(shard)
            else:
                others.append(shard)
        self._tensors = WantedTensors(simple, index)
        self._tensors.check_sizes(reader)
        others += self._tensors.others
        self._planner = ShardedLoadPlanner(  # the core has looked at the casts
            flatten_state_dict=False, allow_globals=allow_globals, allow_dtype_cast=True
        )
        self._others = self._planned(others) if others else None

    def read(self) -> None:
        """Read into the destinations."""
        reads = Reads(self._reader, self._index, self._planner)
        units: list[Sequence[Any]] = [(region,) for region in self._tensors.regions()]
        synchronize_devices(region.target for (region,) in units)
        if self._others is not None:
            self._planner.finish_plan(self._others)
            units += self._planner.units(sorted(self._others.items, key=reads.place))
        reads.read(units)

    def _planned(self, shards: Sequence[ShardedBase]) -> ItemPlan:
        leaves = {str(number): shard for number, shard in enumerate(shards)}
        self._planner.set_up_planner(leaves, _metadata(shards, self._index))
        return self._planner.create_local_plan()


def _is_simple(shard: ShardedTensor, index: StoredIndex) -> bool:
    """Whether its memory is filled region by region, by nothing else, and under the global shape that is stored.

    What is wrong with any other, or what it needs, the planner knows.
    """
    number = index.numbers.get(shard.key)
    if number is None or shard.flattened_range is not None or shard.allow_shape_mismatch or is_quantized(shard.data):
        return False
    if index.dtypes[number] != shard.dtype:
        check_cast(shard.key, index.dtypes[number], shard.dtype)
    return index.shapes[number] == tuple(shard.global_shape)


def _metadata(shards: Iterable[ShardedBase], index: StoredIndex) -> Metadata:
    """What is stored of the shards, as DCP says it; where bytes are is not in it."""
    found: dict[str, Any] = {}
    for shard in shards:
        if isinstance(shard, ShardedTensor) and shard.key in index.numbers:
            found[shard.key] = dcp_tensor(index.tensor(index.numbers[shard.key]))
        elif isinstance(shard, ShardedObject) and shard.unique_key in index.objects:
            found[shard.unique_key] = BytesStorageMetadata()
    return Metadata(state_dict_metadata=found)


def dcp_tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    """A stored tensor as DCP's metadata has it."""
    boxes = (chunk.box for chunk in tensor.chunks.values())
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


__all__ = ["LoadPlan", "dcp_tensor"]

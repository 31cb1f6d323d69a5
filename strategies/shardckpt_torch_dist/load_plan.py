"""What a rank reads, planned: tensors by columns, and what needs more care by the planner that DCP knows too."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.storage.memory import is_ordinary, synchronize_devices
from shardckpt.wrappers import is_quantized
from shardckpt_torch_dist.load_planner import ShardedLoadPlanner, check_cast
from shardckpt_torch_dist.regions import read_chunk, read_object
from shardckpt_torch_dist.runs import ReadAhead, runs
from shardckpt_torch_dist.wanted import Region, WantedTensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import LoadPlan as ItemPlan
    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt.mapping import ShardedBase
    from shardckpt.storage.reader import CheckpointReader
    from shardckpt_torch_dist.runs import Run
    from shardckpt_torch_dist.stored import Item, StoredIndex, StoredTensor


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
        self._planner = ShardedLoadPlanner(flatten_state_dict=False, allow_globals=allow_globals)
        self._others = self._planned(others) if others else None

    def read(self) -> None:
        """Read into the destinations."""
        units: list[Sequence[Any]] = [(region,) for region in self._tensors.regions()]
        synchronize_devices(region.target for (region,) in units)
        if self._others is not None:
            self._planner.finish_plan(self._others)
            units += self._planner.units(sorted(self._others.items, key=self._place))
        self._reader.map(self._read_run, runs(units, self._place), self._nbytes)

    def _planned(self, shards: Sequence[ShardedBase]) -> ItemPlan:
        leaves = {str(number): shard for number, shard in enumerate(shards)}
        self._planner.set_up_planner(leaves, _metadata(shards, self._index))
        return self._planner.create_local_plan()

    def _nbytes(self, run: Run) -> int:
        """Bytes that are wanted of a run; small items count as none: they cost Python's time, not the disk's."""
        if run.small:
            return 0
        return sum(item.target.nbytes if isinstance(item, Region) else self._place(item).length for item in run.items)

    def _place(self, item: Region | ReadItem) -> Item:
        """Where an item's archive is; places sort by file and offset, to read files from front to back."""
        if isinstance(item, Region):
            return item.chunk.item
        if item.type == LoadItemType.BYTE_IO:
            return self._index.objects[item.storage_index.fqn]
        return self._stored(item).chunks[tuple(item.storage_index.offset or ())].item

    def _stored(self, item: ReadItem) -> StoredTensor:
        return self._index.tensor(self._index.numbers[item.storage_index.fqn])

    def _read_run(self, run: Run) -> None:
        if not run.small or len(run.items) == 1:
            for item in run.items:
                self._read(item, None)
            return
        with ReadAhead(self._reader, run) as ahead:
            for item in run.items:
                if not (isinstance(item, Region) and self._copied(item, ahead)):
                    self._read(item, ahead)

    def _copied(self, region: Region, ahead: ReadAhead) -> bool:
        """Whether a whole chunk could be copied as its bytes are."""
        target = region.target
        if not region.whole or target.dtype != self._index.dtypes[region.number] or not is_ordinary(target):
            return False
        return ahead.copy(region.chunk.item, region.chunk.box.shape, target)

    def _read(self, item: Region | ReadItem, ahead: ReadAhead | None) -> None:
        """Read an item; one of a run that was read ahead from there."""
        key = self._index.keys[item.number] if isinstance(item, Region) else item.storage_index.fqn
        whole = None if ahead is None else ahead.read_range(*self._place(item), key)
        if isinstance(item, Region):
            dtype = self._index.dtypes[item.number]
            read_chunk(self._reader, item.chunk, item.start, item.target, dtype, key, whole)
            _settle(item.target)
            return
        if item.type == LoadItemType.BYTE_IO:
            archive = read_object(self._reader, self._index.objects[key], key) if whole is None else whole
            self._planner.load_bytes(item, io.BytesIO(archive))
            return
        tensor = self._stored(item)
        target = self._planner.resolve_tensor(item)
        chunk = tensor.chunks[tuple(item.storage_index.offset or ())]
        read_chunk(self._reader, chunk, tuple(item.storage_offsets), target, tensor.dtype, key, whole)
        _settle(target)
        self._planner.commit_tensor(item, target)


def _settle(target: torch.Tensor) -> None:
    """Wait for copies to a device: this thread's stream is not the caller's."""
    if target.device.type != "cpu":
        synchronize_devices([target])


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
            found[shard.key] = _dcp_tensor(index.tensor(index.numbers[shard.key]))
        elif isinstance(shard, ShardedObject) and shard.unique_key in index.objects:
            found[shard.unique_key] = BytesStorageMetadata()
    return Metadata(state_dict_metadata=found)


def _dcp_tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    boxes = (chunk.box for chunk in tensor.chunks.values())
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


__all__ = ["LoadPlan"]

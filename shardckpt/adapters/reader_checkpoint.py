"""A checkpoint opened by a StorageReader of torch: by the reader's public methods alone."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import shardckpt.tensors.torch_private  # noqa: F401 - the modules that DCP imports then keep no process group
from shardckpt.archive.objects import decode_object
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, listed
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.boxes import unflattened_box
from shardckpt.state_dict import nest_values
from shardckpt.strategy import StoredColumns

if TYPE_CHECKING:
    import io
    from collections.abc import Collection, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import ShardedBase, StateDict

    #: A destination: the key of a tensor, and the offset of a part of it.
    Place = tuple[str, tuple[int, ...]]


class ReaderCheckpoint:
    """Collective: the checkpoint that a reader reads, below one key.

    It is an error, the same on every rank, if the metadata cannot be read, or differs from rank to rank.

    Args:
        reader: Any reader; each method is called as ``dcp.load`` calls it.
        allow_globals: Classes and functions that objects may name besides the plain ones.
    """

    def __init__(self, reader: StorageReader, key: str, comm: Comm, allow_globals: Collection[Any]) -> None:
        self._reader, self._key, self._comm, self._allow = reader, key, comm, allow_globals
        with comm.collective_phase("reading the metadata"):
            self._metadata: Metadata = reader.read_metadata()
            stored = self._metadata.state_dict_metadata
            self._tensors = {key: each for key, each in stored.items() if isinstance(each, TensorStorageMetadata)}
            objects = [each for each in stored if each not in self._tensors and each.startswith(f"{key}.")]
            self._objects = sorted(objects)
            described = [(each, tuple(self._tensors[each].size)) for each in sorted(self._tensors)]
            digest = hashlib.sha256(repr((described, self._objects)).encode()).hexdigest()
        comm.agree(metadata=digest)

    def columns(self) -> StoredColumns:
        """Return the stored names without the values of :meth:`common`."""
        tensors = self._tensors.values()
        dtypes, shapes = ([each.properties.dtype for each in tensors], [tuple(each.size) for each in tensors])
        return StoredColumns(list(self._tensors), dtypes, shapes, (), {})

    def common(self) -> StateDict:
        """Collective: return the values below the key that are not tensors, nested as they were saved."""
        if not self._objects:
            return {}
        zero = torch.Size((0,))  # as DCP's planner makes the items of objects
        indices = map(MetadataIndex, self._objects)
        items = [ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero) for index in indices]
        values = self._read(_Planner(items, {}, self._allow))
        paths = self._metadata.planner_data or {}
        found: StateDict = nest_values((tuple(paths.get(key, (key,))), value) for key, value in values.items())
        return found

    def values(self, wanted: Sequence[ShardedBase]) -> list[torch.Tensor]:
        """Collective: read tensors; where a shard has data, that is filled and returned."""
        items: list[ReadItem] = []
        tensors: dict[Place, torch.Tensor] = {}
        found: list[torch.Tensor] = []
        with self._comm.local_phase("planning the load"):
            for shard in wanted:
                if not isinstance(shard, ShardedTensor):
                    raise CheckpointingException(f"{shard.key!r} is not among the tensors that the reader has listed")
                data = (
                    torch.empty(shard.local_shape, dtype=shard.dtype, device="cpu")
                    if shard.data is None
                    else shard.data
                )
                found.append(data)
                if data.numel():
                    place = (shard.key, unflattened_box(shard).offset)
                    tensors[place] = data
                    items += self._list_items(shard, data.numel())
        self._read(_Planner(items, tensors, self._allow))
        return found

    def _list_items(self, shard: ShardedTensor, numel: int) -> list[ReadItem]:
        """Return the read items for a shard of that many elements."""
        box = unflattened_box(shard)
        chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
        items = create_read_items_for_chunk_list(shard.key, self._tensors[shard.key], [chunk])
        if sum(math.prod(item.lengths) for item in items) != numel:
            raise CorruptCheckpointError(
                f"{shard.key!r}: the stored chunks do not have each element of {box.shape} at {box.offset} once"
            )
        return items

    def _read(self, planner: _Planner) -> dict[str, Any]:
        """Collective: let the reader read a planner's items; return its objects by key."""
        reader, comm = self._reader, self._comm
        with comm.local_phase("planning the load"):
            reader.set_up_storage_reader(self._metadata, comm.is_main)
            plan = reader.prepare_local_plan(planner.create_local_plan())
        plans = comm.gather(plan)
        with comm.local_phase("planning for all ranks"):
            plans = reader.prepare_global_plan(planner.create_global_plan(plans)) if comm.is_main else []
        plan = comm.scatter(plans)
        with comm.collective_phase("reading"):
            reader.read_data(planner.finish_plan(plan), planner).wait()
            planner.check_complete(type(reader).__qualname__)
        return planner.objects


class _Planner(LoadPlanner):
    """Reads given items into given tensors, and objects, by the allow-list, into ``objects``."""

    def __init__(
        self, items: list[ReadItem], tensors: dict[Place, torch.Tensor], allow_globals: Collection[Any]
    ) -> None:
        self._items, self._tensors, self._allow = items, tensors, allow_globals
        #: Elements that are still to be read.
        self._open = {place: tensor.numel() for place, tensor in tensors.items()}
        self.objects: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: StateDict, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the items are known."""

    def create_local_plan(self) -> LoadPlan:
        """Return the items."""
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode an object; nothing outside the allow-list is run."""
        key = read_item.dest_index.fqn
        self.objects[key] = decode_object(value.read(), f"object {key!r}", self._allow)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of a destination that an item fills."""
        starts = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._tensors[_place(read_item)][tuple(slice(start, start + size) for start, size in starts)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that a part is filled."""
        self._open[_place(read_item)] -= tensor.numel()

    def check_complete(self, reader: str) -> None:
        """Raise if the reader has left out something: uninitialised memory would be taken for state."""
        objects = {item.dest_index.fqn for item in self._items if item.type == LoadItemType.BYTE_IO}
        left_out = {key for (key, _), numel in self._open.items() if numel} | (objects - self.objects.keys())
        if left_out:
            raise CheckpointingException(f"{reader}.read_data has not read all of {listed(sorted(left_out))}")


def _place(item: ReadItem) -> Place:
    return item.dest_index.fqn, tuple(item.dest_index.offset or ())

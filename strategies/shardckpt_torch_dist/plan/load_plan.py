"""Plan what a rank reads: most tensors by columns, and shards with special needs by our DCP load planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.tensors import is_quantized, synchronize_devices
from shardckpt_torch_dist.dialects import to_dcp_tensor
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner, check_cast
from shardckpt_torch_dist.plan.reads import ItemReader
from shardckpt_torch_dist.plan.requested import RequestedTensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import LoadPlan as ItemPlan

    from shardckpt.mapping import ShardedBase
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import StoredIndex


class LoadPlan:
    """What one rank reads, checked before anything is read.

    Args:
        requested: The rank's shards.
        index: What is stored.
        reader: The checkpoint's files.
        allow_globals: Classes and functions that objects may name, in addition to the plain ones.

    Raises:
        CheckpointingException: A shard does not match what is stored, or the index contradicts itself.
    """

    def __init__(
        self,
        requested: Sequence[ShardedBase],
        index: StoredIndex,
        reader: CheckpointReader,
        allow_globals: tuple[Any, ...],
    ) -> None:
        self._index = index
        self._reader = reader
        simple: list[ShardedTensor] = []
        others: list[ShardedBase] = []
        for shard in requested:
            if isinstance(shard, ShardedTensor) and _is_simple(shard, index):
                simple.append(shard)
            else:
                others.append(shard)
        self._tensors = RequestedTensors(simple, index)
        self._tensors.check_sizes(reader)
        others += self._tensors.others
        self._planner = ShardedLoadPlanner(  # the engine has checked the casts already
            flatten_state_dict=False, allow_globals=allow_globals, allow_dtype_cast=True
        )
        self._others: ItemPlan | None = None
        if others:
            leaves = {str(number): shard for number, shard in enumerate(others)}
            self._planner.set_up_planner(leaves, _build_metadata(others, index))
            self._others = self._planner.create_local_plan()

    def read(self) -> None:
        """Read everything into the destinations."""
        items = ItemReader(self._reader, self._index, self._planner)
        units: list[Sequence[Any]] = [(region,) for region in self._tensors.regions()]
        # The reading threads have streams of their own: work of the caller's that uses the destinations must be done.
        synchronize_devices(region.target for (region,) in units)
        if self._others is not None:
            self._planner.finish_plan(self._others)
            units += self._planner.units(sorted(self._others.items, key=items.locate))
        items.read(units)


def _is_simple(shard: ShardedTensor, index: StoredIndex) -> bool:
    """Return whether a shard can be filled region by region, and has the stored global shape.

    The planner handles any other, or reports what is wrong with it.
    """
    number = index.numbers.get(shard.key)
    if number is None or shard.flattened_range is not None or shard.allow_shape_mismatch or is_quantized(shard.data):
        return False
    if index.dtypes[number] != shard.dtype:
        check_cast(shard.key, index.dtypes[number], shard.dtype)
    return index.shapes[number] == tuple(shard.global_shape)


def _build_metadata(shards: Iterable[ShardedBase], index: StoredIndex) -> Metadata:
    """Return what is stored of the shards as DCP metadata, without storage locations."""
    found: dict[str, Any] = {}
    for shard in shards:
        if isinstance(shard, ShardedTensor) and shard.key in index.numbers:
            tensor = index.tensor(index.numbers[shard.key])
            found[shard.key] = to_dcp_tensor(tensor.dtype, tensor.shape, tensor.boxes())
        elif isinstance(shard, ShardedObject) and shard.unique_key in index.objects:
            found[shard.unique_key] = BytesStorageMetadata()
    return Metadata(state_dict_metadata=found)

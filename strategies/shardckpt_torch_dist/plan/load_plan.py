"""Plan what a rank reads: the regions of its tensors, and its objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from shardckpt.chunks import RequestedTensors
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner
from shardckpt_torch_dist.plan.regions import ArchiveReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import LoadPlan as ItemPlan

    from shardckpt.mapping import ShardedBase
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import StoredIndex


class LoadPlan:
    """The reads of one rank, checked before anything is read.

    Objects may name ``allow_globals``, in addition to the plain ones.
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
        self._tensors = RequestedTensors([s for s in requested if isinstance(s, ShardedTensor)], index, reader)
        objects = [shard for shard in requested if not isinstance(shard, ShardedTensor)]
        self._planner = ShardedLoadPlanner(flatten_state_dict=False, allow_globals=allow_globals)
        self._objects: ItemPlan | None = None
        if objects:
            leaves = {str(number): shard for number, shard in enumerate(objects)}
            self._planner.set_up_planner(leaves, _build_metadata(objects, index))
            self._objects = self._planner.create_local_plan()

    def read(self) -> None:
        """Read everything into the destinations."""
        items = ArchiveReader(self._reader, self._index, self._planner)
        units: list[Sequence[Any]] = [*self._tensors.units()]
        if self._objects is not None:
            self._planner.finish_plan(self._objects)
            units += ([item] for item in sorted(self._objects.items, key=items.locate))
        items.read_units(units)


def _build_metadata(objects: Iterable[ShardedBase], index: StoredIndex) -> Metadata:
    """Return what is stored of the objects as DCP metadata."""
    found: dict[str, Any] = {}
    for shard in objects:
        if isinstance(shard, ShardedObject) and shard.unique_key in index.objects:
            found[shard.unique_key] = BytesStorageMetadata()
    return Metadata(state_dict_metadata=found)

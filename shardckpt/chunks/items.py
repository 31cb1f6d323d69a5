"""Collect the items of one rank: the boxes of its main replicas, with their tensors, and its objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from shardckpt.errors import ShardingError
from shardckpt.mapping.base import is_main_replica
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.boxes import part_view, shard_parts
from shardckpt.planning.table import Boxes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from shardckpt.mapping.base import ShardedBase
    from shardckpt.mapping.sharded_tensor import BlockScales
    from shardckpt.planning.boxes import FlatPart, Ints


@dataclass
class Sources:
    """The shards that boxes are of.

    Attributes:
        shards: The position, among the rank's shards, of each box's shard.
        parts: The part of its shard that a box is, by the position of the box; none for a box that is all of its shard.
    """

    shards: list[int] = field(default_factory=list)
    parts: dict[int, FlatPart] = field(default_factory=dict)

    def are_one_to_one(self, count: int) -> bool:
        """Return whether each of ``count`` shards has one box, in the order of the shards."""
        return len(self.shards) == count and self._are_in_order

    @cached_property
    def _are_in_order(self) -> bool:
        """Whether box and shard have the same position; each save of a plan asks, when no box is added any more."""
        return self.shards == list(range(len(self.shards)))

    def add(self, shard: int, part: FlatPart | None) -> None:
        """Add a box; ``part`` is None for all of the shard."""
        if part is not None:
            self.parts[len(self.shards)] = part
        self.shards.append(shard)


@dataclass
class LocalItems:
    """The items that a rank stores.

    Attributes:
        keys: The keys of the tensors that it stores parts of.
        dtypes: Their dtypes.
        shapes: Their global shapes.
        boxes: The boxes that it stores.
        tensors: The values of each box.
        sources: The shard of each box.
        objects: The positions of the ShardedObjects among the rank's shards, by unique key.
        scales: The block scales of a tensor, by its key.
    """

    keys: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[Ints] = field(default_factory=list)
    boxes: Boxes = field(default_factory=Boxes)
    tensors: list[torch.Tensor] = field(default_factory=list)
    sources: Sources = field(default_factory=Sources)
    objects: dict[str, int] = field(default_factory=dict)
    scales: dict[str, BlockScales] = field(default_factory=dict)
    _numbers: dict[tuple[str, torch.dtype, Ints], int] = field(default_factory=dict, repr=False)

    def add_tensor(self, key: str, dtype: torch.dtype, shape: Ints) -> int:
        """Return the number of a tensor, its position in ``keys``; a new one is added."""
        number = self._numbers.setdefault((key, dtype, shape), len(self._numbers))
        if number == len(self.keys):
            self.keys.append(key)
            self.dtypes.append(dtype)
            self.shapes.append(shape)
        return number


def view_tensors(sources: Sources, shards: Sequence[Any]) -> list[torch.Tensor]:
    """Return a view of the values of each box, for shards with the same metadata as when the sources were made."""
    data: list[torch.Tensor] = [shard.data for shard in shards]
    views = data if sources.are_one_to_one(len(shards)) else [data[position] for position in sources.shards]
    for number, part in sources.parts.items():
        views[number] = part_view(shards[sources.shards[number]], part)
    # Detach here: a parameter may get other memory before a background save copies it. Checking all tensors is cheaper
    # than detaching each.
    if any(map(attrgetter("requires_grad"), views)):
        return [view.detach() if view.requires_grad else view for view in views]
    return views


def collect_items(shards: Sequence[ShardedBase], left_out: Collection[str] = ()) -> LocalItems:
    """Return the items of the main replicas among a rank's shards; their tensors are views, not copies.

    Tensors are in the order of the shards and of their parts, without those whose keys are in ``left_out``. A tensor
    without data, or a shard that is neither tensor nor object, is a ShardingError.
    """
    items = LocalItems()
    for position, shard in enumerate(shards):
        if not is_main_replica(shard.replica_id):
            continue
        if isinstance(shard, ShardedTensor):
            if shard.key not in left_out:
                _add_shard(items, position, shard)
        elif isinstance(shard, ShardedObject):
            items.objects[shard.unique_key] = position
        else:
            raise ShardingError(f"{shard.key!r}: cannot store a {type(shard).__name__}; build factories first")
    return items


def _add_shard(items: LocalItems, position: int, shard: ShardedTensor) -> None:
    """Add the boxes of a shard, which is at this position among the rank's shards."""
    if shard.data is None:
        raise ShardingError(f"ShardedTensor {shard.key!r} has no data to save")
    number = items.add_tensor(shard.key, shard.dtype, tuple(shard.global_shape))
    if shard.block_scales is not None:
        items.scales[shard.key] = shard.block_scales
    data = shard.data
    if shard.flattened_range is None and not shard.prepend_axis_num:  # as nearly all: fast, without a FlatPart
        view = data.detach() if data.requires_grad else data
        _add_box(items, number, tuple(shard.global_offset), tuple(shard.local_shape), view, position, None)
        return
    for part in shard_parts(shard):
        view = part_view(shard, part)
        _add_box(items, number, *part.box, view, position, None if view.shape == data.shape else part)


def _add_box(
    items: LocalItems,
    number: int,
    offset: Ints,
    extent: Ints,
    view: torch.Tensor,
    position: int,
    part: FlatPart | None,
) -> None:
    # An empty box is stored only of an empty tensor: its shape and dtype would be lost without a box.
    if 0 not in extent or 0 in items.shapes[number]:
        items.boxes.add(number, offset, extent)
        items.tensors.append(view)
        items.sources.add(position, part)

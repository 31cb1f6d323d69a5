"""Collect what one rank stores: the boxes of its main replicas, with their tensors, and its objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import Boxes, part_view, shard_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardckpt.mapping import ShardedBase
    from shardckpt.planning import FlatPart, Ints


#: Where the values of a box come from: the shard, by its position among the rank's, and the part of it; None for all.
Source: TypeAlias = "tuple[int, FlatPart | None]"


@dataclass
class LocalItems:
    """The items that a rank stores.

    Attributes:
        keys: The keys of the tensors of which it stores a part.
        dtypes: Their dtypes.
        shapes: Their global shapes.
        boxes: The boxes that it stores.
        tensors: The values of each box.
        sources: Where each of these comes from.
        objects: The positions of the ShardedObjects among the rank's shards, by unique key.
    """

    keys: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[Ints] = field(default_factory=list)
    boxes: Boxes = field(default_factory=Boxes)
    tensors: list[torch.Tensor] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)


def view_tensors(sources: Sequence[Source], shards: Sequence[Any]) -> list[torch.Tensor]:
    """Return a view of the values of each box, for shards with the same metadata as when the sources were made."""
    return [shards[n].data.detach() if part is None else part_view(shards[n], part) for n, part in sources]


def collect_items(shards: Sequence[ShardedBase]) -> LocalItems:
    """Return the items of the main replicas among a rank's shards; their tensors are views, not copies.

    Raises:
        ShardingError: A tensor has no data, or a shard is of another kind.
    """
    items = LocalItems()
    numbers: dict[tuple[str, torch.dtype, Ints], int] = {}
    for position, shard in enumerate(shards):
        if not is_main_replica(shard.replica_id):
            continue
        if isinstance(shard, ShardedTensor):
            if shard.data is None:
                raise ShardingError(f"ShardedTensor {shard.key!r} has no data to save")
            shape = tuple(shard.global_shape)
            number = numbers.setdefault((shard.key, shard.dtype, shape), len(numbers))
            if number == len(items.keys):
                items.keys.append(shard.key)
                items.dtypes.append(shard.dtype)
                items.shapes.append(shape)
            for part in shard_parts(shard):
                # An empty box is stored only of an empty tensor: its shape and dtype would be lost without a box.
                if 0 not in part.box.shape or 0 in shape:
                    items.boxes.add(number, *part.box)
                    items.tensors.append(part_view(shard, part))
                    items.sources.append((position, None if items.tensors[-1].shape == shard.data.shape else part))
        elif isinstance(shard, ShardedObject):
            items.objects[shard.unique_key] = position
        else:
            raise ShardingError(f"{shard.key!r}: cannot store a {type(shard).__name__}; build factories first")
    return items

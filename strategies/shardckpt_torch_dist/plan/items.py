"""Collect what one rank stores: the boxes of its main replicas, with their tensors, and its objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt.archive import encode_object
from shardckpt.errors import ShardingError
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import Boxes, part_view, shard_parts
from shardckpt_torch_dist.dialects import COMMON_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
        other_keys: The keys under which an object is listed, by unique key; others are listed by their unique key.
    """

    keys: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[Ints] = field(default_factory=list)
    boxes: Boxes = field(default_factory=Boxes)
    tensors: list[torch.Tensor] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)
    other_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add_object(self, shard: ShardedObject, position: int) -> None:
        """Add an object, by its position among the shards; raise ShardingError if the common state has its name."""
        if shard.unique_key == COMMON_KEY:
            raise ShardingError(f"object {shard.key!r}: the common state has that name; use another key")
        self.objects[shard.unique_key] = position
        if isinstance(shard, PlainObject) and shard.keys:
            self.other_keys[shard.unique_key] = shard.keys


def pickle_objects(
    objects: Mapping[str, int], shards: Sequence[ShardedBase], allow_globals: Iterable[Any]
) -> dict[str, bytes]:
    """Return the archives of a rank's objects, by unique key.

    Args:
        objects: The positions of the objects among the shards, by unique key.
        shards: The rank's shards.
        allow_globals: Classes and functions that the objects may name, in addition to the plain ones.

    Raises:
        ShardingError: An object cannot be pickled.
        UnsafePickleError: A load would refuse it.
    """
    found = {}
    for key, number in objects.items():
        found[key] = encode_object(get_stored_value(shards[number]), f"object {key!r}", allow_globals)
    return found


def get_stored_value(shard: Any) -> Any:
    """Return what the archive of a ShardedObject has: as in Megatron a list of it, but of a PlainObject its value."""
    return shard.data if isinstance(shard, PlainObject) else [shard.data]


def view_tensors(sources: Sequence[Source], shards: Sequence[Any]) -> list[torch.Tensor]:
    """Return a view of the values of each box, for shards with the same metadata as when the sources were made."""
    return [shards[n].data.detach() if part is None else part_view(shards[n], part) for n, part in sources]


def collect_items(shards: Sequence[ShardedBase]) -> LocalItems:
    """Return the items of the main replicas among a rank's shards; their tensors are views, not copies.

    Raises:
        ShardingError: A tensor has no data, or an object has the name of the common state.
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
            items.add_object(shard, position)
        else:
            raise ShardingError(f"{shard.key!r}: cannot store a {type(shard).__name__}; build factories first")
    return items

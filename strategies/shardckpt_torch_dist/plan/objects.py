"""A rank's objects, as archives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.archive import encode_object
from shardckpt.errors import ShardingError
from shardckpt.mapping import PlainObject
from shardckpt_torch_dist.dialects import COMMON_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardckpt.mapping import ShardedBase


def pickle_objects(
    objects: Mapping[str, int], shards: Sequence[ShardedBase], allow_globals: Iterable[Any]
) -> dict[str, bytes]:
    """Return the archives of a rank's objects, by unique key.

    Args:
        objects: The positions of the objects among the shards, by unique key.
        shards: The rank's shards.
        allow_globals: Classes and functions that the objects may name, in addition to the plain ones.

    Returns:
        The bytes of an archive of ``torch.save`` for each object.

    Raises:
        ShardingError: An object cannot be pickled, or has the name of the common state.
        UnsafePickleError: A load would refuse it.
    """
    check_keys(objects, shards)
    found: dict[str, bytes] = {}
    encoded: dict[tuple[int, bool], bytes] = {}  # one object may have many keys: the options of an optimizer's group
    for key, number in objects.items():
        shard: Any = shards[number]
        same = (id(shard.data), isinstance(shard, PlainObject))
        if same not in encoded:
            encoded[same] = encode_object(get_stored_value(shard), f"object {key!r}", allow_globals)
        found[key] = encoded[same]
    return found


def check_keys(objects: Mapping[str, int], shards: Sequence[ShardedBase]) -> None:
    """Raise ShardingError if an object has the name of the common state; arguments as of :func:`pickle_objects`."""
    if COMMON_KEY in objects:
        key = shards[objects[COMMON_KEY]].key
        raise ShardingError(f"object {key!r}: the common state has that name; use another key")


def get_stored_value(shard: Any) -> Any:
    """Return what the archive of a ShardedObject has: as in Megatron a list of it, but of a PlainObject its value."""
    return shard.data if isinstance(shard, PlainObject) else [shard.data]


def find_other_keys(objects: Mapping[str, int], shards: Sequence[ShardedBase]) -> dict[str, tuple[str, ...]]:
    """Return the keys under which objects are listed, by unique key; others are listed by their unique key."""
    found = {key: shards[number] for key, number in objects.items()}
    return {key: shard.keys for key, shard in found.items() if isinstance(shard, PlainObject) and shard.keys}

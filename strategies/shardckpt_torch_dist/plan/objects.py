"""A rank's objects, as archives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.archive import encode_object, refuse_unloadable
from shardckpt.errors import ShardingError, UnsafePickleError
from shardckpt.mapping import PlainObject
from shardckpt_torch_dist.dialects import COMMON_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardckpt.mapping import ShardedBase


def pickle_objects(
    objects: Mapping[str, int], shards: Sequence[ShardedBase], allow_globals: Iterable[Any]
) -> dict[str, bytes]:
    """Return the archives of ``torch.save`` of a rank's objects, by unique key.

    ``objects`` has their positions among the shards. They may name ``allow_globals``, in addition to the plain classes
    and functions; an object that a load would refuse is an UnsafePickleError. An object that cannot be pickled, or has
    the name of the common state, is a ShardingError.
    """
    check_keys(objects, shards)
    allowed = tuple(allow_globals)
    values: dict[tuple[int, bool], tuple[str, Any]] = {}  # one may have many keys: the options of an optimizer's group
    for key, number in objects.items():
        shard: Any = shards[number]
        values.setdefault(_find_same(shard), (f"object {key!r}", get_stored_value(shard)))
    try:
        encoded = {same: encode_object(value, what, allowed) for same, (what, value) in values.items()}
    except UnsafePickleError:
        refuse_unloadable(dict(values.values()), allowed)  # all of them
        raise
    return {key: encoded[_find_same(shards[number])] for key, number in objects.items()}


def _find_same(shard: Any) -> tuple[int, bool]:
    """Return a key, equal for shards with the same archive."""
    return id(shard.data), isinstance(shard, PlainObject)


def check_keys(objects: Mapping[str, int], shards: Sequence[ShardedBase]) -> None:
    """Raise ShardingError if an object has the name of the common state; arguments as of :func:`pickle_objects`."""
    if COMMON_KEY in objects:
        key = shards[objects[COMMON_KEY]].key
        raise ShardingError(f"object {key!r}: the common state has that name; use another key")


def get_stored_value(shard: Any) -> Any:
    """Return the value that is pickled: a list with the object, as in Megatron; of a PlainObject the object itself."""
    return shard.data if isinstance(shard, PlainObject) else [shard.data]


def find_other_keys(objects: Mapping[str, int], shards: Sequence[ShardedBase]) -> dict[str, tuple[str, ...]]:
    """Return the keys under which objects are listed, by unique key; others are listed by their unique key."""
    found = {key: shards[number] for key, number in objects.items()}
    return {key: shard.keys for key, shard in found.items() if isinstance(shard, PlainObject) and shard.keys}

"""A Python object in a grid of objects, and one that is stored under plain keys."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field

from shardckpt.errors import CheckpointingException, ShardingError, show_given
from shardckpt.mapping.base import ReplicaId, Replicated, ShardedBase, find_name_fault, make_plain_key


@dataclass
class ShardedObject(ShardedBase):
    """A Python object in a grid of objects: it is loaded as it was saved, never resharded.

    Args:
        key: Name of the grid.
        data: The object, or None where only the description is wanted.
        global_shape: Shape of the grid.
        global_offset: This object's index in the grid.
        replica_id: See :class:`ShardedTensor`.
        replicated: See :class:`ShardedTensor`.
    """

    key: str
    data: object = field(repr=False)
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0
    replicated: Replicated = False

    def __post_init__(self) -> None:
        self.key = make_plain_key(self.key)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise :class:`ShardingError` if the offset does not lie in the grid."""
        if fault := find_name_fault(self):
            raise ShardingError(f"ShardedObject {self.key!r}: {fault}")
        given: tuple[object, object] = (self.global_shape, self.global_offset)
        if not all(isinstance(each, (tuple, list)) and all(hasattr(n, "__index__") for n in each) for each in given):
            raise ShardingError(
                f"ShardedObject {self.key!r}: global_shape and global_offset are tuples of integers, such as (2,) and "
                f"(0,), not {self.global_shape!r:.100} and {self.global_offset!r:.100}"
            )
        if len(self.global_shape) != len(self.global_offset):
            raise ShardingError(
                f"ShardedObject {self.key!r}: global_shape {self.global_shape} and global_offset "
                f"{self.global_offset} differ in length"
            )
        if not all(0 <= off < size for off, size in zip(self.global_offset, self.global_shape, strict=True)):
            raise ShardingError(
                f"ShardedObject {self.key!r}: offset {self.global_offset} lies outside the grid {self.global_shape}"
            )

    def without_data(self) -> ShardedObject:
        """Return the same description with ``data=None``."""
        return dataclasses.replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """``key/shard_<offset>_<shape>``, the name under which Megatron stores the object."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the object, without data, that :attr:`unique_key` names; the key itself may contain ``/``.

        Names written by Megatron 0.4 to 0.7 lack the last extent of the shape; it is taken as the offset plus one.

        Raises:
            CheckpointingException: ``unique_key`` is not of that form.
        """
        if not isinstance(unique_key, str):
            raise CheckpointingException(f"unique_key={show_given(unique_key)}: expected the name of a sharded object")
        key, found, tail = unique_key.rpartition("/shard_")
        offset_text, separator, shape_text = tail.partition("_")
        try:
            offset = _dotted_integers(offset_text)
            shape = _dotted_integers(shape_text)
        except ValueError:
            found = ""
        if not found or not separator:
            raise CheckpointingException(
                f"{unique_key!r} is not the name of a sharded object: expected <key>/shard_<offsets>_<shape>"
            )
        if len(shape) + 1 == len(offset):
            shape = (*shape, offset[-1] + 1)
        return cls(key, None, shape, offset, replica_id)


@dataclass
class PlainObject(ShardedObject):
    """An object that is stored under plain keys, as plain DCP stores values: for other readers than this library.

    A save writes it, if the strategy has a place for such objects; a load leaves it out.

    Args:
        keys: The keys under which readers find the object; by default ``key`` alone. With ``keys``, ``key`` only tells
            it from other objects, and no reader finds it there. If several objects have one of the keys, readers find
            the lowest rank's.
    """

    global_shape: tuple[int, ...] = ()
    global_offset: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def unique_key(self) -> str:
        """The key."""
        return self.key

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the object, without data, that is stored under this name: one of a grid, or else a plain one.

        A name that ends in no place in a grid is plain: ``key/shard_0_2.amax`` is a value inside an object of a grid.
        """
        if "/shard_" in unique_key:  # there may be a million plain ones: an exception for each takes its time
            with suppress(CheckpointingException):
                return ShardedObject.empty_from_unique_key(unique_key, replica_id)
        return cls(unique_key, None, replica_id=replica_id)


def _dotted_integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if text else ()

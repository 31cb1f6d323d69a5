"""What was saved before, by its description: the same shards are neither checked nor planned a second time.

A training saves the same shards again and again, with other values. What is checked across ranks, and planned with
them, depends on the descriptions alone; to compare those with the last ones is much cheaper than either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.strategy import AsyncSaveStrategy, is_recalled
from shardckpt.tensors import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import ShardedBase
    from shardckpt.strategy import PrepareAgain, SaveStrategy
    from shardckpt.validation import GivenShards, Replicas

_LASTING = (Integral, str, type(None), torch.dtype)
#: Saves that are remembered: a job may save two states in turn.
_KEPT = 2
_OF_OBJECTS = ("key", "global_shape", "global_offset", "replica_id", "replicated")
_OF_TENSORS = (
    *_OF_OBJECTS,
    "dtype",
    "local_shape",
    "axis_fragmentations",
    "prepend_axis_num",
    "allow_shape_mismatch",
)


class Description(NamedTuple):
    """All that a rank's shards say, and the form of their tensors; not what is in them.

    Attributes:
        kinds: Of all shards.
        fields: A column for each field of the objects, then of the tensors.
        slices: The flattened ranges of the tensors.
        forms: The shapes and the dtypes of what the tensors hold.
    """

    kinds: list[type[Any]]
    fields: list[list[Any]]
    slices: list[slice | None]
    forms: tuple[list[tuple[int, ...]], list[torch.dtype]]


@dataclass
class Remembered:
    """A save that was checked and planned by all ranks.

    Attributes:
        who: Strategy and ranks.
        description: Of this rank's shards.
        save_id: The save's name, the same on all ranks.
        validated: Whether the shards of all ranks were found to fit together.
        again: Prepares another one.
        replicas: Who has which of the replicated shards.
        given: The shards, to be compared with what is stored.
        layout: Where its tensors stand in staging memory.
    """

    who: Hashable
    description: Description
    save_id: str
    validated: bool
    again: PrepareAgain
    replicas: Replicas
    given: GivenShards
    layout: Any = None


class Sighting(NamedTuple):
    """Shards that are to be saved.

    Attributes:
        who: Strategy and ranks.
        description: Of the shards; None where they cannot be compared with others by it.
        known: When they were saved before.
    """

    who: Hashable = None
    description: Description | None = None
    known: Remembered | None = None

    def mark(self) -> bytes:
        """The same on all ranks if all know the shards from the same save, or none knows them."""
        return b"" if self.known is None else self.known.save_id.encode()


class Recall:
    """The last saves of this process, one rank's part of them."""

    def __init__(self) -> None:
        self._kept: list[Remembered] = []

    def look(
        self, shards: Sequence[ShardedBase], saver: SaveStrategy, comm: Comm, *, validate: bool, background: bool
    ) -> Sighting:
        """Look whether this rank has saved these shards before.

        Args:
            shards: The rank's, before anything is checked.
            saver: Who saves them.
            comm: The ranks that save.
            validate: Whether only a save will do whose shards were found to fit together.
            background: Whether they are to be saved in the background.
        """
        if not isinstance(saver, AsyncSaveStrategy) or not is_recalled(saver):
            return Sighting()
        if not background and not saver.saves_as_prepared:
            return Sighting()
        who = (saver.plans_like, tuple(comm.members), comm.rank)
        description = describe(shards)
        fitting = (r for r in self._kept if r.who == who and (r.validated or not validate))
        return Sighting(who, description, next((r for r in fitting if _same(r.description, description)), None))

    def keep(
        self,
        sighting: Sighting,
        save_id: str,
        again: PrepareAgain | None,
        replicas: Replicas,
        given: GivenShards,
        *,
        validated: bool,
    ) -> Remembered | None:
        """Remember a save, if it can be prepared again and nothing in its description can change."""
        if again is None or sighting.description is None or not _is_lasting(sighting.description):
            return None
        found = Remembered(sighting.who, sighting.description, save_id, validated, again, replicas, given)
        self._kept = [found, *self._kept][:_KEPT]
        return found

    def forget(self) -> None:
        """Remember nothing."""
        self._kept = []


#: The last saves of this process.
recall = Recall()
os.register_at_fork(after_in_child=recall.forget)


def describe(shards: Sequence[ShardedBase]) -> Description | None:
    """What shards say of themselves; None if they, or their tensors, are of classes that may have more to say."""
    tensors = [shard for shard in shards if type(shard) is ShardedTensor]
    objects = [shard for shard in shards if type(shard) is ShardedObject]
    data: list[Any] = [shard.data for shard in tensors]
    if len(tensors) + len(objects) < len(shards) or not set(map(type, data)) <= set(ORDINARY):
        return None
    return Description(
        list(map(type, shards)),
        [*_columns(_OF_OBJECTS, objects), *_columns(_OF_TENSORS, tensors)],
        [shard.flattened_range for shard in tensors],
        ([tensor.shape for tensor in data], [tensor.dtype for tensor in data]),
    )


def _columns(names: Iterable[str], shards: Sequence[ShardedBase]) -> Iterator[list[Any]]:
    return (list(map(attrgetter(name), shards)) for name in names)


def _same(one: Description, other: Description | None) -> bool:
    try:
        return one == other
    except Exception:  # noqa: BLE001 - arrays do not say yes or no; they are not what is remembered
        return False


def _is_lasting(description: Description) -> bool:
    """Whether the caller cannot change what it holds: all fields are numbers, texts, dtypes, and tuples of them."""
    values = [value for column in description.fields for value in column]
    kinds = {type(value) for value in values if not isinstance(value, tuple)}
    kinds.update(type(part) for value in values if isinstance(value, tuple) for part in value)
    return all(issubclass(kind, _LASTING) for kind in kinds)


__all__ = ["Description", "Recall", "Remembered", "Sighting", "describe", "recall"]

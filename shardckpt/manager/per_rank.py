"""States that every rank has its own of: data loaders, random generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedObject

if TYPE_CHECKING:
    from collections.abc import Callable


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and loaded."""

    def state_dict(self) -> Any:
        """Its state now."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Set its state."""


@dataclass(frozen=True)
class PerRank:
    """Wraps a state that is each rank's own: stored once a rank, and given back to the rank that had it.

    Attributes:
        state: Plain data, and tensors on any device; stored as one object a rank.
        reshard: Makes a rank's state of those of all ranks, where another number of ranks loads than saved:
            ``reshard(states, rank, world_size)``, ``states`` by rank. Without it such a load is an error.
    """

    state: Stateful
    reshard: Callable[[list[Any], int, int], Any] | None = None

    def describe(self, name: str, rank: int, world_size: int) -> ShardedObject:
        """This rank's, to be saved."""
        return ShardedObject(name, self.state.state_dict(), (world_size,), (rank,))

    def wanted(self, name: str, rank: int, world_size: int, saved: int) -> list[ShardedObject]:
        """What this rank loads of what ``saved`` ranks saved.

        Raises:
            CheckpointingException: they were not as many as load, and nothing makes their states fit.
        """
        if saved != world_size and self.reshard is None:
            raise CheckpointingException(
                f"the state {name!r} was saved by {saved} rank(s), each its own, and {world_size} load: wrap it as "
                f"PerRank({name}, reshard=...), a function (states, rank, world_size) that makes a rank's state of "
                f"those of all, or put {name!r} into exclude_from_loading"
            )
        places = range(saved) if saved != world_size else [rank]
        return [ShardedObject(name, None, (saved,), (place,), replica_id=rank) for place in places]

    def restore(self, loaded: list[Any], rank: int, world_size: int, saved: int) -> None:
        """Hand over what was loaded for :meth:`wanted`."""
        fits = saved == world_size or self.reshard is None
        self.state.load_state_dict(loaded[0] if fits else self.reshard(loaded, rank, world_size))  # type: ignore[misc]


__all__ = ["PerRank", "Stateful"]

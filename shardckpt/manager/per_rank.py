"""States that differ from rank to rank: data loaders, random generators."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shardckpt.errors import CheckpointingException, ConfigurationError, format_many, show_given
from shardckpt.mapping.sharded_object import ShardedObject

if TYPE_CHECKING:
    from collections.abc import Callable


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> Any:
        """Return the state: plain data and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Set the state to one that :meth:`state_dict` returned."""


#: Advice where the number of ranks may change.
ADVICE = "reshard=...: a function (states, rank, world_size) that returns the state of one rank"


@dataclass(frozen=True)
class PerRank:
    """Wraps a state that differs from rank to rank: every rank saves its own, and loads its own.

    Example::

        states = {"model": model, "dataloader": PerRank(loader)}

    Attributes:
        state: The object. Its state (plain data, and tensors on any device) is stored as one object a rank.
        reshard: Returns the state of one rank if the number of ranks has changed since the save:
            ``reshard(states, rank, world_size)`` with the saved ``states`` by rank. Without it, such a load is an
            error; a manager that saves warns of it at its start.

    Raises:
        ConfigurationError: ``reshard`` is no function that takes these three.
    """

    state: Stateful
    reshard: Callable[[list[Any], int, int], Any] | None = None

    def __post_init__(self) -> None:
        if self.reshard is None:
            return
        try:
            with suppress(ValueError):  # some functions of extensions have no signature
                inspect.signature(self.reshard).bind([], 0, 1)
        except TypeError as exc:
            raise ConfigurationError(f"PerRank: {show_given(self.reshard)} cannot be called ({exc}): {ADVICE}") from exc

    def describe(self, name: str, rank: int, world_size: int) -> ShardedObject:
        """Return the description of this rank's state, for a save."""
        return ShardedObject(name, self.state.state_dict(), (world_size,), (rank,))

    def request(self, name: str, rank: int, world_size: int, saved_world_size: int) -> list[ShardedObject]:
        """Return descriptions of the states that this rank loads: its own state, or all ranks' states for ``reshard``.

        Raises:
            CheckpointingException: the number of ranks has changed, and there is no ``reshard``.
        """
        if saved_world_size != world_size and self.reshard is None:
            saved_by = format_many(saved_world_size, "rank")
            raise CheckpointingException(
                f"the state {name!r} was saved by {saved_by}, each with a state of its own, and is loaded by "
                f"{world_size}: put {name!r} into exclude_from_loading, or give its PerRank {ADVICE}"
            )
        indices = range(saved_world_size) if saved_world_size != world_size else [rank]
        return [ShardedObject(name, None, (saved_world_size,), (index,), replica_id=rank) for index in indices]

    def restore(self, loaded: list[Any], rank: int, world_size: int, saved_world_size: int) -> None:
        """Set the state to the loaded values of :meth:`request`."""
        if saved_world_size != world_size and self.reshard is not None:
            self.state.load_state_dict(self.reshard(loaded, rank, world_size))
        else:
            self.state.load_state_dict(loaded[0])

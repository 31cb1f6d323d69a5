"""What a CheckpointManager is told of fault tolerance: which replica this is, and who says which take part."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable

_ID = re.compile(r"[A-Za-z0-9._-]+")
#: The name of our functions among those that torchft calls.
_KEY = "shardckpt"


@runtime_checkable
class ReplicaManager(Protocol):
    """Says which replicas take part in a step, as torchft's ``Manager`` does.

    It also has ``register_state_dict_fn(key, load_state_dict, state_dict)`` or, as torchft 0.1,
    ``set_state_dict_fns(load_state_dict, state_dict)``: it calls these functions on each rank by itself, where a
    replica that joins takes over the states of one that is at work.
    """

    def participating_rank(self) -> int | None:
        """The number of this replica among those that take part in the step; None if it does not."""


@dataclass(frozen=True)
class FaultTolerance:
    """Makes a CheckpointManager that of one of several replicas, each with ranks and a process group of its own.

    Attributes:
        manager: torchft's ``Manager`` or its like, of this rank. One CheckpointManager registers with it.
        replica_id: Of this replica: the same after a restart, and no other's. Letters, digits, ``.``, ``_``, ``-``.
        healed: Called with the step when this replica has taken over the states of another, and its loader has been
            set to the place that belongs to them: for a loader whose iterators do not see that (torchdata's
            StatefulDataLoader), begin a new one.
    """

    manager: ReplicaManager
    replica_id: str | int
    healed: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.manager, ReplicaManager):
            raise CheckpointingException(
                f"fault tolerance: a {type(self.manager).__name__} has no participating_rank(): give torchft's Manager"
            )
        if not _ID.fullmatch(str(self.replica_id)):
            raise CheckpointingException(
                f"fault tolerance: the replica_id {self.replica_id!r} is to be part of a directory's name: give one of "
                "letters, digits, '.', '_' and '-'"
            )

    @property
    def folder(self) -> str:
        """The name of the directory with this replica's own checkpoints: torchtitan's."""
        return f"ft-replicat-{self.replica_id}"

    def register(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Have the manager heal by these functions.

        Raises:
            CheckpointingException: it has no such method, or another CheckpointManager has registered.
        """
        by_key = getattr(self.manager, "register_state_dict_fn", None)
        alone = getattr(self.manager, "set_state_dict_fns", None)
        if by_key is None and alone is None:
            raise CheckpointingException(
                f"fault tolerance: a {type(self.manager).__name__} has neither register_state_dict_fn nor "
                "set_state_dict_fns: a replica that joins would train with weights of its own"
            )
        if by_key is None:
            alone(load_state_dict, state_dict)  # type: ignore[misc]
            return
        try:
            by_key(_KEY, load_state_dict, state_dict)
        except AssertionError as exc:  # torchft's answer to a key that it has
            raise CheckpointingException(
                "fault tolerance: another CheckpointManager has registered with this manager already: make a new one "
                "for each"
            ) from exc


__all__ = ["FaultTolerance", "ReplicaManager"]

"""The fault tolerance options of a CheckpointManager: which replica this is, and which manager of replicas to ask."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable

_ID = re.compile(r"[A-Za-z0-9._-]+")
#: The key under which torchft registers our functions.
_KEY = "shardckpt"


@runtime_checkable
class ReplicaManager(Protocol):
    """An object that says which replicas take part in a step, such as torchft's ``Manager``.

    It must also have ``register_state_dict_fn(key, load_state_dict, state_dict)`` or, as in torchft 0.1,
    ``set_state_dict_fns(load_state_dict, state_dict)``. When a replica joins, it calls ``state_dict`` on each rank of a
    replica that is training and ``load_state_dict`` on the same rank of the one that joins. These calls are not
    collective: ranks may be called at different times.
    """

    def participating_rank(self) -> int | None:
        """Return the index of this replica among those that take part in the step; None if it does not take part."""


@dataclass(frozen=True)
class FaultTolerance:
    """Says that a CheckpointManager is that of one of several replicas, each with its own ranks and process group.

    Example::

        manager = torchft.Manager(...)
        tolerance = FaultTolerance(manager, replica_id=os.environ["REPLICA_GROUP_ID"])
        checkpoints = CheckpointManager(config, states, replica_group, fault_tolerance=tolerance)

    Attributes:
        manager: This rank's torchft ``Manager``, or a similar object. Only one CheckpointManager can register with it.
        replica_id: A name of this replica that is unique and the same after a restart. Letters, digits, ``.``, ``_``,
            ``-``.
        healed: Called with the step after this replica has loaded the states of another and set its data loader to the
            position that belongs to that step. Start a new iterator there if the loader's iterators do not follow
            ``load_state_dict`` (torchdata's StatefulDataLoader).

    Raises:
        CheckpointingException: ``manager`` has no ``participating_rank()``, or ``replica_id`` has other characters.
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
                f"fault tolerance: the replica_id {self.replica_id!r} becomes part of a directory's name: use letters, "
                "digits, '.', '_' and '-' only"
            )

    @property
    def folder(self) -> str:
        """The name of the directory of this replica's own checkpoints, the same as torchtitan's."""
        return f"ft-replicat-{self.replica_id}"

    def register(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Register the functions that transfer the states to a replica that joins.

        Args:
            load_state_dict: Sets the states of this rank to those of the same rank of another replica.
            state_dict: Returns the states of this rank.

        Raises:
            CheckpointingException: the manager has no method for it, or another CheckpointManager has registered.
        """
        by_key = getattr(self.manager, "register_state_dict_fn", None)
        without_key = getattr(self.manager, "set_state_dict_fns", None)
        if by_key is None and without_key is None:
            raise CheckpointingException(
                f"fault tolerance: a {type(self.manager).__name__} has neither register_state_dict_fn nor "
                "set_state_dict_fns: a replica that joins would not get the weights of the others"
            )
        if by_key is None:
            without_key(load_state_dict, state_dict)  # type: ignore[misc]
            return
        try:
            by_key(_KEY, load_state_dict, state_dict)
        except AssertionError as exc:  # torchft asserts that the key is new
            raise CheckpointingException(
                "fault tolerance: another CheckpointManager has registered with this manager already: make a new one "
                "for each"
            ) from exc

"""Options that make a CheckpointManager one of several fault-tolerant replicas."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable

_ID = re.compile(r"[A-Za-z0-9._-]+")
#: The key under which torchft registers our functions.
_KEY = "shardckpt"
#: The managers of replicas with which a CheckpointManager has registered, by id: they may not be hashable.
_registered: WeakValueDictionary[int, ReplicaManager] = WeakValueDictionary()


@runtime_checkable
class ReplicaManager(Protocol):
    """An object that says which replicas take part in a step, such as torchft's ``Manager``.

    It must also have ``register_state_dict_fn(key, load_state_dict, state_dict)`` or, as in torchft 0.1,
    ``set_state_dict_fns(load_state_dict, state_dict)``. When a replica joins, it calls ``state_dict`` on each rank of a
    replica that is training and ``load_state_dict`` on the same rank of the one that joins. These calls are not
    collective: ranks may be called at different times.
    """

    def participating_rank(self) -> int | None:
        """Return this replica's index among the participants of the step; None if it does not take part."""


@dataclass(frozen=True)
class FaultTolerance:
    """Tells a CheckpointManager that it is one of several replicas, each with its own ranks and process group.

    Example::

        manager = torchft.Manager(...)
        tolerance = FaultTolerance(manager, replica_id=os.environ["REPLICA_GROUP_ID"])
        checkpoints = CheckpointManager(config, states, replica_group, fault_tolerance=tolerance)

    Attributes:
        manager: This rank's torchft ``Manager``, or a similar object. Only one CheckpointManager can register with it.
        replica_id: A name of this replica that is unique and the same after a restart. Letters, digits, ``.``, ``_``,
            ``-``.
        healed: Called with the step once this replica has loaded the states of another, and its data loader is at the
            position of that step. If the loader's iterators do not follow ``load_state_dict`` (torchdata's
            StatefulDataLoader), start a new one in it.

    Raises:
        CheckpointingException: ``manager`` has no ``participating_rank()``, or ``replica_id`` is neither an integer nor
            a name of these characters.
    """

    manager: ReplicaManager
    replica_id: str | int
    healed: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.manager, ReplicaManager):
            raise CheckpointingException(
                f"fault tolerance: a {type(self.manager).__name__} has no participating_rank(): give torchft's Manager"
            )
        is_number = isinstance(self.replica_id, int) and not isinstance(self.replica_id, bool)
        if not is_number and not (isinstance(self.replica_id, str) and _ID.fullmatch(self.replica_id)):
            raise CheckpointingException(
                f"fault tolerance: the replica_id {self.replica_id!r} becomes part of a directory's name: give an "
                "integer, or text of letters, digits, '.', '_' and '-' only"
            )

    @property
    def folder(self) -> str:
        """The name of the directory of this replica's own checkpoints, the same as torchtitan's."""
        return f"ft-replicat-{self.replica_id}"

    def register(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Register the functions that transfer the states to a replica that joins.

        Args:
            load_state_dict: Sets the states of this rank to the states of the same rank of another replica.
            state_dict: Returns the states of this rank.

        Raises:
            CheckpointingException: the manager has no method for it, or another CheckpointManager has registered.
        """
        by_key = getattr(self.manager, "register_state_dict_fn", None)
        register = getattr(self.manager, "set_state_dict_fns", None) if by_key is None else partial(by_key, _KEY)
        if register is None:
            raise CheckpointingException(
                f"fault tolerance: a {type(self.manager).__name__} has neither register_state_dict_fn nor "
                "set_state_dict_fns: a replica that joins would not get the weights of the others"
            )
        # torchft 0.1 would replace the functions of the first; later releases refuse a second one by an assert
        if id(self.manager) in _registered:
            raise CheckpointingException(
                "fault tolerance: another CheckpointManager has registered with this manager already (if only one that "
                "failed to open): make a new one for each"
            )
        register(load_state_dict, state_dict)
        _registered[id(self.manager)] = self.manager

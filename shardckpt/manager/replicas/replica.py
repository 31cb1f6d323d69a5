"""One of several replicas that train the same model: its saves, loads, and transfers from another replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException, show_given
from shardckpt.manager.part import ManagerPart
from shardckpt.manager.replicas.checkpoints import ReplicaCheckpoints
from shardckpt.manager.replicas.fault_tolerance import FaultTolerance
from shardckpt.manager.replicas.healing import Healing
from shardckpt.manager.steps import StepFolder
from shardckpt.plugins.manager import get_plugin_manager

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.states import TrainingStates

_DATALOADER = "dataloader"


class Replica(ManagerPart):
    """The part of a CheckpointManager for one of several replicas.

    :class:`PerRank` states (data loaders, random generators) belong to the replica, which saves and loads them itself.
    All other states are the same in all replicas: one replica saves them, and all load them.

    When a replica joins, torchft transfers to it the other states of one that is training. Its own states are then set
    to the newest that it saved up to that step, so that it reads on from where it was lost. When all replicas restart
    from a step, each loads its own states of that step: the steps after it are trained a second time, with the same
    data.

    States that do not allow fault tolerance are an error, the same on every rank of the replica.

    Args:
        fault_tolerance: Which replica this is, and which manager of replicas to ask.
    """

    def __init__(
        self,
        fault_tolerance: FaultTolerance,
        config: CheckpointConfig,
        states: TrainingStates,
        process_group: ProcessGroup | None,
        allow_globals: Iterable[Any],
    ) -> None:
        #: How many steps the training has made.
        self.step = 0
        self.own_states = tuple(states.per_rank) if config.enable_ft_dataloader_checkpoints else ()
        self._tolerance = fault_tolerance
        self._group = process_group
        self._checkpoints: ReplicaCheckpoints | None = None
        comm = Comm(process_group)
        with comm.collective_phase("registering with the replica manager"):
            if not isinstance(fault_tolerance, FaultTolerance):
                raise CheckpointingException(
                    f"fault_tolerance={show_given(fault_tolerance)}: give FaultTolerance(manager, replica_id), whose "
                    "manager is torchft's Manager"
                )
            if _DATALOADER in states.names and _DATALOADER not in states.per_rank:
                raise CheckpointingException(
                    f"the state {_DATALOADER!r} is not wrapped in PerRank: a replica that joins would get another "
                    "replica's position in the data; give PerRank(loader)"
                )
            self._healing = Healing(states)
            fault_tolerance.register(self._take, self._give)
        if self.own_states and config.enable_checkpoint:
            with comm.collective_phase("opening the folder of the replica"):
                comm.agree(replica_id=fault_tolerance.replica_id)
                folders = (
                    StepFolder(f"{config.folder}/{fault_tolerance.folder}", get_plugin_manager()),
                    StepFolder(config.folder, get_plugin_manager()),
                )
                self._checkpoints = ReplicaCheckpoints(*folders, states, config, process_group, allow_globals)

    def on_step(self, step: int) -> None:
        """Store the step: a replica that joins gets it with the states."""
        self.step = step

    def joins_step(self, step: int, *, due: bool) -> bool:
        """Collective: save the replica's own states; return whether this replica saves the checkpoint of the step.

        The first replica that takes part saves it.
        """
        comm = Comm(self._group)
        rank = comm.main_runs("asking which replicas take part", self._tolerance.manager.participating_rank)
        # Copies (extra state) are outdated after each step; other tensors are the live ones.
        if due or self._healing.has_copies:
            with comm.local_phase("refreshing the modules' tensors"):
                self._healing.refresh()
        if rank is None:  # a spare, or a replica that has yet to get the states: the step that it made does not count
            self.advance()
        elif self._checkpoints is not None:
            self._checkpoints.save(step, due=due)
        return rank == 0

    def after_load(self, step: int | None) -> None:
        """Collective: load the replica's own states."""
        self.step = step or 0
        with Comm(self._group).collective_phase("refreshing the modules' tensors"):
            self._healing.refresh()
        if self._checkpoints is not None:
            self._checkpoints.load(step)

    def advance(self, *, blocking: bool = False) -> None:
        """Collective: commit the replica's own checkpoint that is being written."""
        if self._checkpoints is not None:
            self._checkpoints.advance(blocking=blocking)

    def close(self, error: BaseException | None = None) -> None:
        """Collective: finish the background work of the replica's own checkpoints, and end its threads."""
        if self._checkpoints is not None:
            self._checkpoints.close(error)

    def _give(self) -> dict[str, Any]:
        return {"step": self.step, "states": self._healing.give()}

    def _take(self, given: dict[str, Any]) -> None:
        """Set the states to another replica's. Not collective: torchft calls it on each rank by itself."""
        self._healing.take(given["states"])
        self.step = given["step"]
        if self._checkpoints is not None:
            self._checkpoints.restore_up_to(self.step)
        if self._tolerance.healed is not None:
            self._tolerance.healed(self.step)

"""One of several replicas that train the same model: what it saves and loads, and what it takes from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.manager.part import ManagerPart
from shardckpt.manager.replicas.checkpoints import ReplicaCheckpoints
from shardckpt.manager.replicas.healing import Healing
from shardckpt.manager.steps import StepFolder
from shardckpt.plugins import host

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.replicas.fault_tolerance import FaultTolerance
    from shardckpt.manager.states import TrainingStates

_DATALOADER = "dataloader"


class Replica(ManagerPart):
    """What a CheckpointManager does besides, where it is that of one replica of several.

    The states that each rank has its own of (data loaders, random generators) are the replica's own, the others are
    alike in all replicas: one of these saves them, and all load them.

    Where a replica joins, torchft gives it the states of one at work. Its own then are set to the newest that it has
    saved up to that step: it reads on where it was when it was lost. Where all begin again from a step, each has its
    own of that step: what was read since is read again, as the steps are made again.

    Args:
        fault_tolerance: Which replica, and who says what it does.
        config: The manager's.
        states: The training's.
        process_group: The replica's ranks.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save`.

    Raises:
        CheckpointingException: the same on every rank of the replica: its states cannot be those of a replica.
    """

    def __init__(
        self,
        fault_tolerance: FaultTolerance,
        config: CheckpointConfig,
        states: TrainingStates,
        process_group: ProcessGroup | None,
        allow_globals: Iterable[Any],
    ) -> None:
        #: The steps made, as far as the manager knows.
        self.step = 0
        self.own_states = tuple(states.per_rank) if config.enable_ft_dataloader_checkpoints else ()
        self._tolerance = fault_tolerance
        self._group = process_group
        self._checkpoints: ReplicaCheckpoints | None = None
        comm = Comm(process_group)
        with comm.collective_phase("registering with the replica manager"):
            _check_loader(states)
            self._healing = Healing(states)
            fault_tolerance.register(self._take, self._give)
        if self.own_states and config.enable_checkpoint:
            with comm.collective_phase("opening the replica's own folder"):
                comm.agree(replica_id=fault_tolerance.replica_id)
                folders = (
                    StepFolder(f"{config.folder}/{fault_tolerance.folder}", host()),
                    StepFolder(config.folder, host()),
                )
                self._checkpoints = ReplicaCheckpoints(*folders, states, config, process_group, allow_globals)

    def on_step(self, step: int) -> None:
        """Remember how far the training has come: a replica that joins is told."""
        self.step = step

    def joins_step(self, step: int, *, due: bool) -> bool:
        """Collective: save what is the replica's own; whether it is this replica that saves the rest."""
        comm = Comm(self._group)
        rank = comm.main_runs("asking which replicas take part", self._tolerance.manager.participating_rank)
        if due or self._healing.has_copies:
            with comm.local_phase("looking at the modules"):
                self._healing.refresh()
        if rank is None:  # it has still to take over another's states, or is a spare: what it read was for nothing
            self.advance()
        elif self._checkpoints is not None:
            self._checkpoints.save(step, due=due)
        return rank == 0

    def after_load(self, step: int | None) -> None:
        """Collective: load what is the replica's own."""
        self.step = step or 0
        with Comm(self._group).collective_phase("looking at the modules"):
            self._healing.refresh()
        if self._checkpoints is not None:
            self._checkpoints.load(step)

    def advance(self, *, blocking: bool = False) -> None:
        """Collective: commit what is written of the replica's own."""
        if self._checkpoints is not None:
            self._checkpoints.advance(blocking=blocking)

    def close(self, error: BaseException | None = None) -> None:
        """Collective: end the background."""
        if self._checkpoints is not None:
            self._checkpoints.close(error)

    def _give(self) -> dict[str, Any]:
        return {"step": self.step, "states": self._healing.give()}

    def _take(self, given: dict[str, Any]) -> None:
        """Go on from another replica's states; on each rank by itself."""
        self._healing.take(given["states"])
        self.step = given["step"]
        if self._checkpoints is not None:
            self._checkpoints.restore_up_to(self.step)
        if self._tolerance.healed is not None:
            self._tolerance.healed(self.step)


def _check_loader(states: TrainingStates) -> None:
    if _DATALOADER in states.names and _DATALOADER not in states.per_rank:
        raise CheckpointingException(
            f"the state {_DATALOADER!r} is not wrapped in PerRank: a replica that joins would be given another's place "
            "in the data; give PerRank(loader)"
        )


__all__ = ["Replica"]

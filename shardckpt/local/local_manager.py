"""Local checkpoints of all ranks by steps: on the disks of their nodes, with copies on those of others."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.engine import locate_local
from shardckpt.errors import (
    CheckpointingException,
    CommunicationError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
)
from shardckpt.local.inventory import Inventory
from shardckpt.local.local_checkpoint import load_local, save_local
from shardckpt.local.part_transfer import Route, transfer_parts
from shardckpt.local.parts import PartFolder, PartId, SaveId
from shardckpt.local.tensor_aware import TensorAwareStateDict

if TYPE_CHECKING:
    import os
    from collections.abc import Container, Iterable

    from torch.distributed import ProcessGroup

    from shardckpt.local.clique import CliqueReplication
    from shardckpt.local.parts import Listing

logger = logging.getLogger(__name__)

#: What a part fails with on whose place a copy may be better.
_DAMAGED = (CorruptCheckpointError, IncompleteCheckpointError, NotACheckpointError, StorageError)


class LocalCheckpointManager:
    """Saves each rank's part on its node's disk, and finds and loads the newest step that the disks have together.

    A restart needs as many ranks as have saved. It bears the loss of nodes as far as ``replication`` goes: a rank that
    lacks its part gets it from a rank of its clique. All methods are collective.

    Args:
        root: A directory on this rank's node, for this job alone; ranks of the same node may have the same.
        replication: Who keeps copies of whose parts; by default there are none.
        process_group: The ranks, by default all.
        keep: How many complete steps stay, at least 1.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save` and ``load``.

    Raises:
        CheckpointingException: arguments that cannot be, or are not the same on every rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        replication: CliqueReplication | None = None,
        process_group: ProcessGroup | None = None,
        keep: int = 1,
        *,
        allow_globals: Iterable[Any] = (),
    ) -> None:
        comm = Comm(process_group)
        with comm.collective_phase("opening local checkpoints"):
            _check(replication, keep, comm)
            self._folder = PartFolder(locate_local(root, "keep local checkpoints on"))
        self._replication = replication
        self._group = process_group
        self._keep = keep
        self._allow_globals = tuple(allow_globals)

    def save(self, state: TensorAwareStateDict, step: int) -> None:
        """Save a step: it counts when every rank has its part and all copies that it keeps; then older steps go.

        A step that is there already stays until the new save of it is complete; later steps stay.

        Args:
            state: This rank's part, its tensors in place; nothing changes in it.
            step: Of the training, the same on every rank.

        Raises:
            CheckpointingException: the same on every rank; the steps that were there are there.
        """
        comm = Comm(self._group)
        with comm.local_phase("saving a local checkpoint"):
            _check_state(state)
            _check_step(step)
            comm.agree(step=step)
            listing, inventory = self._look(comm)
            self._clear(listing, inventory)
            save = SaveId(step, comm.broadcast(_stamp(step, inventory)), comm.world_size)
            self._write(state, save, comm)
            self._remove(listing, inventory.superseded(save, self._keep))

    def find_latest(self) -> int | None:
        """The newest step of which every rank's part is on some rank's disk; None if there is none.

        Files are looked at, not read; what is damaged or incomplete does not count, and is named in a warning.
        """
        comm = Comm(self._group)
        _, inventory = self._look(comm)
        self._warn(inventory, comm)
        latest = inventory.latest()
        return None if latest is None else latest.step

    def load(self, step: int | None = None) -> TensorAwareStateDict:
        """This rank's part of a step, its tensors on the CPU.

        A part that is not on this rank's disk, or is damaged there, is copied to it from another rank's, with a
        warning. What is lost of other ranks' copies comes back with the next save.

        Args:
            step: The same on every rank; by default the newest that loads.

        Raises:
            CannotLoadError: there is no such step, it is incomplete, or another number of ranks saved it.
            CorruptCheckpointError: all copies of a part are damaged.
        """
        comm = Comm(self._group)
        with comm.local_phase("loading a local checkpoint"):
            comm.agree(step=step)
            _, inventory = self._look(comm)
            self._warn(inventory, comm)
            with comm.collective_phase("choosing a step"):
                saves = inventory.loadable(step)
            return self._load_first(saves, inventory, comm)

    def _look(self, comm: Comm) -> tuple[Listing, Inventory]:
        with comm.local_phase("listing local checkpoints"):
            listing = self._folder.look()
        return listing, Inventory(comm.all_gather(listing.parts))

    def _warn(self, inventory: Inventory, comm: Comm) -> None:
        if comm.is_main:
            for text in inventory.complaints():
                logger.warning("local checkpoints: %s", text)

    def _clear(self, listing: Listing, inventory: Inventory) -> None:
        """Make room: what saves that did not end have left is of no use where there is a complete one."""
        self._folder.clear(listing.leftovers)
        if inventory.complete:  # else a disk may be missing that is found again
            self._remove(listing, set(inventory.saves) - set(inventory.complete))

    def _remove(self, listing: Listing, saves: Container[SaveId]) -> None:
        self._folder.remove(part for part in listing.parts if part.save in saves)

    def _write(self, state: TensorAwareStateDict, save: SaveId, comm: Comm) -> None:
        """Save the parts and the copies; nothing of them stays if that fails."""
        mine, routes = PartId(save, comm.rank), self._copies(save)
        try:
            with comm.collective_phase("saving this rank's part"):
                save_local(state, self._folder.path(mine), allow_globals=self._allow_globals)
            if routes:
                self._replicate(routes, comm)
        except CommunicationError:
            raise  # a rank that is gone may have left others who count the step, and have removed older ones
        except Exception:
            self._folder.remove([mine, *(route.part for route in routes if route.target == comm.rank)])
            raise

    def _replicate(self, routes: list[Route], comm: Comm) -> None:
        with comm.collective_phase("looking at the disks of cliques"):
            self._check_apart([route for route in routes if route.target == comm.rank])
        faults = transfer_parts(routes, self._folder, comm)
        with comm.local_phase("copying parts to other disks"):
            if faults:
                raise StorageError("not all parts were copied: " + "; ".join(dict.fromkeys(faults.values())))

    def _check_apart(self, routes: list[Route]) -> None:
        """Raise if the parts that this rank is to get are there already: others have saved them on the same disk."""
        for route in routes:
            if self._folder.path(route.part).exists():
                raise CheckpointingException(
                    f"ranks {route.source} and {route.target} are in one clique and have the same disk, "
                    f"{self._folder.root}: give each node's own directory as root, and CliqueReplication as jump the "
                    "number of ranks of a node"
                )

    def _copies(self, save: SaveId) -> list[Route]:
        """Which parts go to which ranks."""
        if self._replication is None:
            return []
        cliques = [self._replication.clique_of(rank) for rank in range(save.world_size)]
        return [
            Route(PartId(save, rank), rank, other)
            for rank, clique in enumerate(cliques)
            for other in clique
            if other != rank
        ]

    def _load_first(self, saves: list[SaveId], inventory: Inventory, comm: Comm) -> TensorAwareStateDict:
        """The first of the saves that loads."""
        reasons = []
        for save in saves:
            state, why = self._load(save, inventory, comm)
            if state is not None:
                return state
            reasons.append(f"step {save.step} cannot be loaded: {why}")
            if comm.is_main:
                logger.warning("local checkpoints: %s", reasons[-1])
        raise CorruptCheckpointError(
            "; ".join(reasons) + "; load the last global checkpoint with dist_checkpointing.load()"
        )

    def _load(self, save: SaveId, inventory: Inventory, comm: Comm) -> tuple[TensorAwareStateDict | None, str]:
        """Every rank's part, from wherever it is whole; else why not, the same on every rank."""
        sources = {rank: inventory.others(PartId(save, rank)) for rank in range(comm.world_size)}
        state, fault = self._read(PartId(save, comm.rank))
        while True:
            lacking = {rank: why for rank, why in enumerate(comm.all_gather(fault)) if why}
            lost = [f"rank {rank}: {why}" for rank, why in lacking.items() if not sources[rank]]
            if lost:
                return None, "; ".join(lost)
            if not lacking:
                return state, ""
            routes = [Route(PartId(save, rank), sources[rank].pop(0), rank) for rank in lacking]
            failed = transfer_parts(routes, self._folder, comm)
            if fault:
                state, fault = self._fetched(next(r for r in routes if r.target == comm.rank), fault, failed)

    def _fetched(self, route: Route, before: str, failed: dict[Route, str]) -> tuple[TensorAwareStateDict | None, str]:
        """This rank's part once a copy of it has come, or why it did not."""
        if route in failed:
            return None, f"{before}; {failed[route]}"
        logger.warning("rank %d has its part from rank %d: %s", route.target, route.source, before)
        return self._read(route.part)

    def _read(self, part: PartId) -> tuple[TensorAwareStateDict | None, str]:
        """A part on this rank's disk, or what is wrong with it."""
        try:
            return load_local(self._folder.path(part), allow_globals=self._allow_globals), ""
        except _DAMAGED as exc:
            return None, str(exc)


def _check(replication: CliqueReplication | None, keep: int, comm: Comm) -> None:
    cliques = None if replication is None else (replication.jump, replication.factor)
    comm.agree(keep=keep, replication=cliques)
    if type(keep) is not int or keep < 1:
        raise CheckpointingException(f"keep={keep!r}: at least 1 complete step stays")
    if replication is not None and replication.members != comm.members:
        raise CheckpointingException(
            f"the cliques are of ranks {replication.members}, the manager is of {comm.members}: give both the same "
            "process_group"
        )


def _check_state(state: Any) -> None:
    if not isinstance(state, TensorAwareStateDict):
        raise CheckpointingException(
            f"expected a TensorAwareStateDict, got a {type(state).__name__}: from_state_dict gives a part, and what is "
            "to be passed as cached_metadata next time; save takes the part"
        )


def _check_step(step: int) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise CheckpointingException(f"step={step!r}: expected a whole number from 0 on")


def _stamp(step: int, inventory: Inventory) -> int:
    """Later than that of any other save of the step, whatever the clock says."""
    return max(
        time.time_ns(), *(save.stamp + 1 for save in (*inventory.saves, *inventory.foreign) if save.step == step), 0
    )


__all__ = ["LocalCheckpointManager"]

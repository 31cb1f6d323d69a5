"""Local checkpoints of all ranks by training step: on the disks of their nodes, with copies on other nodes."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NoReturn

from shardckpt.distributed.comm import Comm
from shardckpt.engine.locations import locate_local
from shardckpt.errors import (
    CheckpointingException,
    CommunicationError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
    parse_globals,
    refuse_copy,
    show_given,
)
from shardckpt.local.clique import CliqueReplication
from shardckpt.local.inventory import Inventory
from shardckpt.local.local_checkpoint import check_part, load_local, save_local
from shardckpt.local.part_transfer import Route, transfer_parts
from shardckpt.local.parts import PartFolder, PartId, SaveId
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Container, Iterable

    from torch.distributed import ProcessGroup

    from shardckpt.local.parts import Listing
    from shardckpt.local.tensor_aware import TensorAwareStateDict

logger = logging.getLogger(__name__)

#: Errors of a damaged part, after which a copy on another disk is tried.
_DAMAGED = (CorruptCheckpointError, IncompleteCheckpointError, NotACheckpointError, StorageError)


class LocalCheckpointManager:
    """Saves each rank's part on the disk of its node, and loads the newest step that has all its parts.

    A restart needs the same number of ranks. Parts on nodes that were lost come from the disks of other nodes, if
    ``replication`` put copies there. Every rank must make the manager, and call each of its methods.

    Example:
        ::

            manager = LocalCheckpointManager("/local/checkpoints", CliqueReplication(jump=8, factor=2))
            if manager.find_latest() is not None:
                state_dict = manager.load().to_state_dict(sharded_state_dict, algo="fully_parallel")
            ...
            state, cache = TensorAwareStateDict.from_state_dict(sharded_state_dict, cached_metadata=cache)
            manager.save(state, step)

    Args:
        root: A directory on this rank's node that no other job uses; ranks of a node may share it.
        replication: Which ranks keep which parts as copies; by default there are no copies.
        process_group: The ranks, by default all.
        keep: Number of complete steps that are kept, at least 1.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save` and ``load``.

    Raises:
        CheckpointingException: arguments are invalid, or not the same on every rank.
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
            check_annotated(LocalCheckpointManager.__init__, locals())
            _check_replication(replication, comm)
            cliques = None if replication is None else (replication.jump, replication.factor)
            comm.agree(keep=int(keep), replication=cliques)
            if keep < 1:
                raise CheckpointingException(f"keep={keep}: expected an integer of at least 1")
            self._folder = PartFolder(locate_local(root, "keep local checkpoints on"))
        self._replication = replication
        self._group = process_group
        self._keep = int(keep)
        self._allow_globals = parse_globals(allow_globals)
        self._has_warned_of_later = False

    def __reduce__(self) -> NoReturn:
        refuse_copy(self, "a process group, and the disk", "of the same arguments")

    def save(self, state: TensorAwareStateDict, step: int) -> None:
        """Collective: save a step; once every rank has its part and the copies that it keeps, remove older steps.

        An earlier save of the same step stays until the new one is complete. Later steps stay, with one warning: after
        going back to an earlier step, remove them with :meth:`discard_after`.

        Args:
            state: This rank's part, with its tensors in place; it is not changed.
            step: Training step, the same on every rank.

        Raises:
            CheckpointingException: the same on every rank; the complete steps that existed before still exist.
        """
        comm = Comm(self._group)
        with comm.local_phase("saving a local checkpoint"):
            check_part(state)
            check_annotated(LocalCheckpointManager.save, locals())
            step = _parse_step(step)
            comm.agree(step=step)
            listing, inventory = self._list_all_parts(comm)
            self._folder.clear(listing.leftovers)
            if inventory.complete:  # else the incomplete ones stay: the node with their missing parts may come back
                self._remove(listing, set(inventory.saves) - set(inventory.complete))
            # the save must be the newest of its step, even if the clock went back
            least_stamps = [save.stamp + 1 for save in (*inventory.saves, *inventory.foreign) if save.step == step]
            # the main rank's clock gives the stamp: parts of one save must have equal names on all ranks
            save = SaveId(step, comm.broadcast(max([time.time_ns(), *least_stamps])), comm.world_size)
            self._write(state, save, comm)
            self._remove(listing, inventory.list_superseded(save, self._keep))
            later = inventory.describe_later(step)
            if later and comm.is_main and not self._has_warned_of_later:  # once: each save is another step
                self._has_warned_of_later = True
                logger.warning("local checkpoints: %s", later)

    def discard_after(self, step: int) -> list[int]:
        """Collective: remove all later steps from all disks, after a training went back to this one.

        Else a restart would load the newest, which the training has left.

        Args:
            step: The last step that stays, the same on every rank.

        Returns:
            The steps that were removed, in ascending order.

        Raises:
            CheckpointingException: the same on every rank: no complete step would be left, and nothing is removed; or
                a StorageError: a disk still has a part.
        """
        comm = Comm(self._group)
        with comm.local_phase("discarding local checkpoints"):
            check_annotated(LocalCheckpointManager.discard_after, locals())
            step = _parse_step(step)
            comm.agree(step=step)
            listing, inventory = self._list_all_parts(comm)
            later = inventory.list_later(step)
            with comm.collective_phase("looking for a step that stays"):
                if later and all(save.step > step for save in inventory.complete):
                    raise CheckpointingException(
                        f"discard_after({step}): no complete step up to it is on the disks: none would be left; "
                        "save one first"
                    )
            self._remove(listing, later)
            self._has_warned_of_later = False
            _, inventory = self._list_all_parts(comm)
            with comm.collective_phase("looking for later steps"):
                if left := inventory.list_later(step):
                    steps = ", ".join(sorted({str(save.step) for save in left}))
                    raise StorageError(
                        f"discard_after({step}): parts of later steps could not be removed (see the log): {steps}; a "
                        "load would take a complete one: look whether the disks are writable, and call again"
                    )
        return sorted({save.step for save in later})

    def find_latest(self) -> int | None:
        """Collective: find the newest step with every rank's part on some rank's disk.

        The sizes of files are checked, not their bytes. Damaged and incomplete saves are ignored, with a warning.

        Returns:
            The step, or None if there is none; the same on every rank.
        """
        comm = Comm(self._group)
        _, inventory = self._list_all_parts(comm)
        self._warn(inventory, comm)
        latest = inventory.find_latest()
        return None if latest is None else latest.step

    def load(self, step: int | None = None) -> TensorAwareStateDict:
        """Collective: load this rank's part of a step.

        A part that is missing or damaged on this rank's disk is copied to it from another rank's disk, with a warning.
        Copies of other ranks' parts that were lost are not restored before the next save.

        Args:
            step: The same on every rank; by default the newest that can be loaded.

        Returns:
            This rank's part, its tensors on the CPU.

        Raises:
            CannotLoadError: there is no such step, it is incomplete, or another number of ranks saved it.
            CorruptCheckpointError: all copies of a part are damaged.
        """
        comm = Comm(self._group)
        with comm.local_phase("loading a local checkpoint"):
            check_annotated(LocalCheckpointManager.load, locals())
            step = None if step is None else _parse_step(step)
            comm.agree(step=step)
            _, inventory = self._list_all_parts(comm)
            self._warn(inventory, comm)
            with comm.collective_phase("choosing a step"):
                saves = inventory.list_loadable(step)
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

    def _list_all_parts(self, comm: Comm) -> tuple[Listing, Inventory]:
        """Collective: list the parts on this rank's disk, and on all."""
        with comm.local_phase("listing local checkpoints"):
            listing = self._folder.list_parts()
        return listing, Inventory(comm.all_gather(listing.parts))

    def _warn(self, inventory: Inventory, comm: Comm) -> None:
        if comm.is_main:
            for text in inventory.list_faults():
                logger.warning("local checkpoints: %s", text)

    def _remove(self, listing: Listing, saves: Container[SaveId]) -> None:
        self._folder.remove(part for part in listing.parts if part.save in saves)

    def _write(self, state: TensorAwareStateDict, save: SaveId, comm: Comm) -> None:
        """Collective: save this rank's part, and copy parts to other disks; if that fails, remove all of these."""
        mine, routes = PartId(save, comm.rank), self._plan_copies(save)
        try:
            with comm.collective_phase("saving this rank's part"):
                save_local(state, self._folder.path(mine), allow_globals=self._allow_globals)
            if routes:
                self._replicate(routes, comm)
        except CommunicationError:
            # keep the parts: ranks that did not notice the failure may count the step, and have removed older ones
            raise
        except Exception:
            self._folder.remove([mine, *(route.part for route in routes if route.target == comm.rank)])
            raise

    def _replicate(self, routes: list[Route], comm: Comm) -> None:
        """Collective: copy the parts to the disks of their cliques."""
        with comm.collective_phase("checking the disks of cliques"):
            for route in routes:
                # the source has just written the part: if the target has it before the copy, both have the same disk
                if route.target == comm.rank and self._folder.path(route.part).exists():
                    raise CheckpointingException(
                        f"ranks {route.source} and {route.target} are in one clique and have the same disk, "
                        f"{self._folder.root}: pass a directory on each node's own disk as root, and the number of "
                        "ranks per node as jump of CliqueReplication"
                    )
        faults = transfer_parts(routes, self._folder, comm)
        with comm.local_phase("copying parts to other disks"):
            if faults:
                raise StorageError("not all parts were copied: " + "; ".join(dict.fromkeys(faults.values())))

    def _plan_copies(self, save: SaveId) -> list[Route]:
        """Return which parts are copied to which ranks."""
        if self._replication is None:
            return []
        return [
            Route(PartId(save, rank), rank, other)
            for rank in range(save.world_size)
            for other in self._replication.clique_of(rank)
            if other != rank
        ]

    def _load(self, save: SaveId, inventory: Inventory, comm: Comm) -> tuple[TensorAwareStateDict | None, str]:
        """Collective: load this rank's part, from another rank's disk if need be.

        Return the part, or None and the reason why some rank's part cannot be loaded, the same on every rank.
        """
        sources = {rank: inventory.find_other_holders(PartId(save, rank)) for rank in range(comm.world_size)}
        state, fault = self._read(PartId(save, comm.rank))
        while True:  # each round tries one more copy of each part that a rank lacks
            faults = {rank: why for rank, why in enumerate(comm.all_gather(fault)) if why}
            lost = [f"rank {rank}: {why}" for rank, why in faults.items() if not sources[rank]]
            if lost:
                return None, "; ".join(lost)
            if not faults:
                return state, ""
            routes = [Route(PartId(save, rank), sources[rank].pop(0), rank) for rank in faults]
            failed = transfer_parts(routes, self._folder, comm)
            for route in routes:
                if route.target != comm.rank:
                    continue
                if route in failed:
                    fault = f"{fault}; {failed[route]}"
                else:
                    logger.warning("rank %d has its part from rank %d: %s", comm.rank, route.source, fault)
                    state, fault = self._read(route.part)

    def _read(self, part: PartId) -> tuple[TensorAwareStateDict | None, str]:
        """Return a part on this rank's disk, or None and its fault."""
        try:
            return load_local(self._folder.path(part), allow_globals=self._allow_globals), ""
        except _DAMAGED as exc:
            return None, str(exc)


def _parse_step(step: int) -> int:
    if not 0 <= step < 10**18:
        raise CheckpointingException(f"step={step}: expected an integer from 0 to 10**18 - 1")
    return int(step)  # numpy's, too


def _check_replication(replication: CliqueReplication | None, comm: Comm) -> None:
    if not isinstance(replication, CliqueReplication | None):
        raise CheckpointingException(f"replication={show_given(replication)}: expected a CliqueReplication or None")
    if replication is not None and replication.members != comm.members:
        raise CheckpointingException(
            f"the cliques are of ranks {replication.members}, the manager is of {comm.members}: pass both the same "
            "process_group"
        )

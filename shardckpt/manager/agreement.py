"""Which step all ranks load: one decides for all, or, where each has a disk of its own, all decide together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardckpt.distributed import Comm
    from shardckpt.manager.steps import StepCheckpoint, StepFolder

logger = logging.getLogger(__name__)

NEWEST = -1
_LISTED = 20


def agreed_step(
    folder: StepFolder, comm: Comm, step: int = NEWEST, *, shared: bool = True, without: Collection[int] = ()
) -> int | None:
    """The step to load, the same on all ranks, all of which call; None if there is none.

    What is damaged, or was never committed, is skipped with a warning that names it. What is whole, but can be read
    by no installed strategy, is not: to go on from an older step would lose what was trained since.

    Args:
        folder: Where to look.
        comm: The ranks.
        step: -1 for the newest that counts, or a certain one.
        shared: Whether all ranks see the same folder: then the main rank alone looks. Else each looks at its own, and
            the newest step counts that all of them have.
        without: Steps that were found to be damaged, when they were read: they are passed over.

    Raises:
        CannotLoadError: the certain step is not there, not whole, or nothing reads it; or nothing reads the newest.
        CorruptCheckpointError: the certain step is damaged; or no step can be loaded, and some are damaged.
        StorageError: the folder cannot be looked at.
    """
    comm.agree(step=step, without=sorted(without))
    if shared:
        return comm.main_runs("choosing the step", lambda: _choose(folder, step, without))
    if step != NEWEST:
        with comm.collective_phase("choosing the step"):
            _check(folder, step)
        return step
    return _newest_of_all(folder, comm, without)


def _choose(folder: StepFolder, step: int, without: Collection[int]) -> int | None:
    if step == NEWEST:
        return _newest(folder, without)
    _check(folder, step)
    return step


def _check(folder: StepFolder, step: int) -> None:
    """Whether a certain step can be loaded."""
    found = folder.look(step)
    error = found.error or found.refusal
    if error is not None:
        raise type(error)(f"step {step} cannot be loaded: {error}\nin {folder} there are {_listed(folder.steps())}")


def _newest(folder: StepFolder, without: Collection[int]) -> int | None:
    damaged = len(without)
    for step in reversed(folder.steps()):
        if step in without:
            continue
        found = folder.look(step)
        if found.refusal is not None:
            raise found.refusal
        if found.counts:
            return step
        _warn(folder, found)
        damaged += found.is_damaged
    _check_damage(folder, damaged)
    return None


def _newest_of_all(folder: StepFolder, comm: Comm, without: Collection[int]) -> int | None:
    with comm.local_phase("looking for checkpoints on the disk of each rank"):
        found = {step: folder.look(step) for step in folder.steps() if step not in without}
        whole = {step for step, checkpoint in found.items() if checkpoint.error is None}
        for checkpoint in found.values():
            if checkpoint.error is not None:
                _warn(folder, checkpoint)
    everyone = comm.all_gather(whole)
    newest = max(set.intersection(*everyone), default=None)
    if comm.is_main:
        _warn_of_parts(folder, everyone, newest)
    damaged = comm.largest(sum(checkpoint.is_damaged for checkpoint in found.values()))[0]
    with comm.collective_phase("choosing the step"):
        if newest is None:
            _check_damage(folder, damaged + len(without))
        elif (refusal := found[newest].refusal) is not None:
            raise refusal
    return newest


def _check_damage(folder: StepFolder, damaged: int) -> None:
    """Whether there is nothing to load because nothing was saved, and not because it was lost."""
    if damaged:
        raise CorruptCheckpointError(
            f"{folder}: no checkpoint there can be loaded, and {damaged} are damaged (the log names them); training "
            "does not begin anew by itself: move them away if it should, or give another folder"
        )


def _warn(folder: StepFolder, found: StepCheckpoint) -> None:
    what = "damaged" if found.is_damaged else "not a whole checkpoint"
    logger.warning("step %d in %s is skipped, %s: %s", found.step, folder, what, found.fault)


def _warn_of_parts(folder: StepFolder, everyone: list[set[int]], newest: int | None) -> None:
    newer = sorted(step for step in set.union(*everyone) if newest is None or step > newest)
    for step in newer:
        lacking = [rank for rank, steps in enumerate(everyone) if step not in steps]
        logger.warning("step %d in %s is skipped: %s have it not", step, folder, f"ranks {_shortened(lacking)}")


def _listed(steps: list[int]) -> str:
    return f"the steps {_shortened(steps)}" if steps else "no steps"


def _shortened(numbers: Iterable[int]) -> str:
    """The numbers in order; of very many the last."""
    ordered = sorted(numbers)
    return ("..., " if len(ordered) > _LISTED else "") + ", ".join(map(str, ordered[-_LISTED:]))


__all__ = ["NEWEST", "agreed_step"]

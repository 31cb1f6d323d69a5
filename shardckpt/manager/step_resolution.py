"""Step resolution: all ranks choose the same step to load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardckpt.distributed import Comm
    from shardckpt.manager.reader import StepReader
    from shardckpt.manager.steps import StepCheckpoint, StepFolder

logger = logging.getLogger(__name__)

NEWEST = -1
_LISTED = 20


def read_step(folder: StepFolder, reader: StepReader, comm: Comm, step: int = NEWEST) -> int | None:
    """Collective: load the step that :func:`resolve_step` chooses; if the newest proves damaged, the one before it.

    Returns:
        The step that was loaded; None if there is no checkpoint.
    """
    damaged: list[int] = []
    while (found := resolve_step(folder, comm, step, without=damaged)) is not None:
        try:
            reader.read(folder.path(found))
        except CorruptCheckpointError as exc:  # noqa: PERF203 - a load takes longer; every rank gets the same error
            if step != NEWEST:
                raise
            if comm.is_main:
                logger.warning("step %d in %s is skipped, damaged: %s", found, folder, exc)
            damaged.append(found)
        else:
            logger.info("loaded step %d of %s", found, folder)
            return found
    return None


def resolve_step(
    folder: StepFolder, comm: Comm, step: int = NEWEST, *, shared: bool = True, without: Collection[int] = ()
) -> int | None:
    """Collective: choose the step to load.

    A checkpoint that is damaged or was never committed is skipped with a warning that names it. A complete checkpoint
    that no installed strategy can read is an error instead: to continue from an older step would lose training.

    Args:
        folder: The folder of the steps.
        comm: The ranks.
        step: The step to load; -1 for the newest.
        shared: If True, all ranks see the same folder, and the main rank alone chooses. If False, each rank has its own
            disk, and the newest step that all ranks have is chosen.
        without: Steps that proved damaged when they were read, to be skipped.

    Returns:
        The step, the same on all ranks; None if there is no checkpoint.

    Raises:
        CannotLoadError: ``step`` does not exist, is not complete, or no strategy reads it; or none reads the newest.
        CorruptCheckpointError: ``step`` is damaged; or no step can be loaded, and some are damaged.
        StorageError: the folder cannot be listed.
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
    """Raise if a step cannot be loaded, with the steps that exist."""
    found = folder.inspect_step(step)
    error = found.error or found.refusal
    if error is not None:
        raise type(error)(f"step {step} cannot be loaded: {error}\nin {folder} there are {_listed(folder.steps())}")


def _newest(folder: StepFolder, without: Collection[int]) -> int | None:
    damaged = len(without)
    for step in reversed(folder.steps()):
        if step in without:
            continue
        found = folder.inspect_step(step)
        if found.refusal is not None:
            raise found.refusal
        if found.is_loadable:
            return step
        _warn(folder, found)
        damaged += found.is_damaged
    _check_damage(folder, damaged)
    return None


def _newest_of_all(folder: StepFolder, comm: Comm, without: Collection[int]) -> int | None:
    with comm.local_phase("looking for checkpoints on the disk of each rank"):
        found = {step: folder.inspect_step(step) for step in folder.steps() if step not in without}
        complete = {step for step, checkpoint in found.items() if checkpoint.error is None}
        for checkpoint in found.values():
            if checkpoint.error is not None:
                _warn(folder, checkpoint)
    complete_by_rank = comm.all_gather(complete)
    newest = max(set.intersection(*complete_by_rank), default=None)
    if comm.is_main:
        _warn_of_missing_steps(folder, complete_by_rank, newest)
    damaged = comm.largest(sum(checkpoint.is_damaged for checkpoint in found.values()))[0]
    with comm.collective_phase("choosing the step"):
        if newest is None:
            _check_damage(folder, damaged + len(without))
        elif (refusal := found[newest].refusal) is not None:
            raise refusal
    return newest


def _check_damage(folder: StepFolder, damaged: int) -> None:
    """Raise if no checkpoint can be loaded because those that were saved are damaged."""
    if damaged:
        raise CorruptCheckpointError(
            f"{folder}: no checkpoint there can be loaded, and {damaged} are damaged (the log names them); to start "
            "the training from the beginning, move them away or give another folder"
        )


def _warn(folder: StepFolder, found: StepCheckpoint) -> None:
    what = "damaged" if found.is_damaged else "not a complete checkpoint"
    logger.warning("step %d in %s is skipped, %s: %s", found.step, folder, what, found.fault)


def _warn_of_missing_steps(folder: StepFolder, complete_by_rank: list[set[int]], newest: int | None) -> None:
    newer = sorted(step for step in set.union(*complete_by_rank) if newest is None or step > newest)
    for step in newer:
        lacking = [rank for rank, steps in enumerate(complete_by_rank) if step not in steps]
        logger.warning("step %d in %s is skipped: ranks %s do not have it", step, folder, _shortened(lacking))


def _listed(steps: list[int]) -> str:
    return f"the steps {_shortened(steps)}" if steps else "no steps"


def _shortened(numbers: Iterable[int]) -> str:
    """Return the numbers in order as text; if there are many, only the highest."""
    ordered = sorted(numbers)
    return ("..., " if len(ordered) > _LISTED else "") + ", ".join(map(str, ordered[-_LISTED:]))


__all__ = ["NEWEST", "read_step", "resolve_step"]

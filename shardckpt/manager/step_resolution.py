"""Step resolution: all ranks choose the same step to load."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Literal

from shardckpt.distributed.error_report import replace_text
from shardckpt.engine.operation import report_skipped
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    list_given,
    listed,
    name_call,
    name_known,
)
from shardckpt.maintenance.inside import list_local_names
from shardckpt.maintenance.mending import explain_mendable
from shardckpt.manager.retention import KeepBest
from shardckpt.manager.step_names import parse_number
from shardckpt.manager.steps import MissingStatesError
from shardckpt.manifest.names import MARKERS
from shardckpt.storage.abilities import takes_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shardckpt.distributed.comm import Comm
    from shardckpt.manager.reader import StepReader
    from shardckpt.manager.steps import StepCheckpoint, StepFolder

logger = logging.getLogger(__name__)

NEWEST = -1
_LISTED = 20  # steps that an error names, the newest; folders in one without a step that are looked into
_LOOKED_AT = 10  # older steps that are searched for states that a step lacks, the newest


def read_step(
    folder: StepFolder, reader: StepReader, comm: Comm, step: int = NEWEST, *, step_0_model_only: bool = False
) -> int | None:
    """Collective: load the step that :func:`resolve_step` chooses; if the newest proves damaged, the one before it.

    Return the step that was loaded; None if there is no checkpoint.
    """
    damaged: list[int] = []
    while (found := resolve_step(folder, comm, step, damaged)) is not None:
        try:
            reader.read(folder.path(found), model_only=step_0_model_only and found == 0)
        except CorruptCheckpointError as exc:  # noqa: PERF203 - a load takes longer; every rank gets the same error
            if step != NEWEST:
                raise
            if comm.is_main:
                logger.warning("step %d in %s is skipped, damaged: %s", found, folder, exc)
            damaged.append(found)
            folder.damaged[found] = str(exc)
        except MissingStatesError as exc:
            older = comm.main_runs("looking for the missing states", partial(_advise_of_older, folder, reader, found))
            raise (replace_text(exc, f"{exc}{older}") if older else exc) from exc.__cause__
        else:
            is_seed = step_0_model_only and found == 0
            logger.info("loaded %s of %s", "the model alone of step 0" if is_seed else f"step {found}", folder)
            return found
    return None


def warn_of_others(folder: StepFolder) -> None:
    """Warn where a folder without a step is a checkpoint, or has some by other names. Not collective."""
    if takes_requests(folder.place) or not folder.place.is_dir():  # one for each name
        return

    def is_other(name: str) -> bool:
        # False where it may not be inspected: it is about something that need not be there
        return any(os.path.isfile(folder.place / name / marker) for marker in MARKERS)  # noqa: PTH113

    try:
        names = sorted(name for name in list_local_names(folder.place)("").folders if folder.names.parse(name) is None)
    except StorageError:
        return
    is_itself = is_other("")
    others = [] if is_itself else [name for name in names[:_LISTED] if is_other(name)]
    if is_itself or others:
        named = f"it has {listed(others, limit=6)}, and the names of steps are step-<n>"
        logger.warning(
            "%s has no step, so nothing is loaded: %s; initial_load_path=... loads such a one into a new folder "
            "(initial_load_model_only=False: with all states)",
            folder,
            "it is a checkpoint itself" if is_itself else named,
        )


def _advise_of_older(folder: StepFolder, reader: StepReader, step: int) -> str:
    """Return which newest step before this one has all states that are to be loaded, ``""`` if none is known."""
    try:
        lacks = reader.list_missing(folder.inspect_step(step).states)
        older = _find_older(folder, step, lambda found: not reader.list_missing(found.states))
    except CheckpointingException:  # of the folder: it must not replace the error of the states
        return ""
    if older < 0:
        return ""
    return f"\nstep {older} has {listed([*map(repr, lacks)], limit=6)}: manager.load(step={older})"


def _find_older(folder: StepFolder, step: int, suits: Callable[[StepCheckpoint], bool] = lambda _: True) -> int:
    """Return which of the newest steps before this one is sound and suits, -1 if none does."""
    older = [each for each in reversed(folder.steps()) if each < step][:_LOOKED_AT]
    return next((each.step for each in map(folder.inspect_step, older) if each.is_sound and suits(each)), -1)


def resolve_step(folder: StepFolder, comm: Comm, step: int = NEWEST, without: Collection[int] = ()) -> int | None:
    """Collective: choose the step to load, the same on all ranks; None if there is no checkpoint.

    The main rank alone looks: on slow file systems others may see less. A step that is damaged, was never committed, or
    was marked as failed by a verification is skipped with a warning that names it; those in ``without`` proved damaged
    when they were read. A complete checkpoint that no installed strategy can read is a CannotLoadError instead, and a
    step that the file system does not let us read a StorageError: to continue from an older step would lose training.
    If no step can be loaded, and some are damaged, it is a CorruptCheckpointError. A ``step`` that is named (not -1,
    the newest) must be one that can be loaded: else it is a CannotLoadError, or a CorruptCheckpointError if it is
    damaged.
    """
    with comm.local_phase("reading the steps to skip"):
        without = sorted({parse_number(each, "without", "a list of steps") for each in list_given(without)})
    comm.agree(step=step, without=without)
    return comm.main_runs(
        "choosing the step", lambda: find_newest(folder, without) if step == NEWEST else check_step(folder, step)
    )


def check_step(folder: StepFolder, step: int) -> int:
    """Return a step, or raise with the steps that exist if it cannot be loaded; not collective."""
    found = folder.inspect_step(step)
    error = found.error or found.refusal
    if error is None:
        return step
    found_steps = folder.steps()
    steps = [each for each in found_steps if each != step]
    numbers = ("..., " if len(steps) > _LISTED else "") + ", ".join(map(str, steps[-_LISTED:]))
    other = "other " if step in found_steps else ""
    there = f"the {other}steps {numbers}" if steps else f"no {other}steps"
    if (older := _find_older(folder, step)) >= 0:
        there += f"; the newest whole one before it is {older}: manager.load(step={older})"
    elif steps and step not in found_steps:
        there += f"; the nearest is {min(steps, key=lambda other: abs(other - step))}"
    if found.error is not None and step in found_steps:
        path = folder.path(step)
        removal = f"{name_call('prune', folder, '--damaged')} removes such steps, and saves that did not end"
        there += (
            f"\n{name_call('verify', path)} says what is damaged; {explain_mendable(path, folder.plugins) or removal}"
        )
    # the error of a path has the names in its folder, which are the steps
    why = "it does not exist" if steps and type(error) is NotACheckpointError and step not in found_steps else error
    raise replace_text(error, f"step {step} cannot be loaded: {why}\nin {folder} there are {there}")


def find_best(folder: StepFolder, metric: str, mode: Literal["min", "max"]) -> int | None:
    """Return the loadable step with the best metric, None if there are no loadable steps; not collective.

    It is an error if no step has a finite value of the metric, or if none is named (``""``).
    """
    folder.forget()  # another process may have saved, marked or damaged any of them
    found = {each.step: each.metrics for each in folder.committed() if each.is_sound}
    if not found:
        return None
    if metric and (best := KeepBest(metric, 1, mode)(found)):
        return best[0]
    by_which = "by which metric? best_step('loss'), or CheckpointConfig(best_metric=...)"
    what = f"no step has a value of the metric {metric!r}" if metric else by_which
    names = {name for metrics in found.values() for name in metrics}
    raise CheckpointingException(f"the best step of {folder}: {what} {name_known(metric, names, 'metrics')}")


def find_newest(folder: StepFolder, without: Collection[int] = ()) -> int | None:
    """Return the newest step that can be loaded, None if there is no checkpoint; not collective.

    Steps in ``without`` are known to be damaged. A newest complete checkpoint that no installed strategy can read is a
    CannotLoadError; a newest step that the file system does not let us read is a StorageError. If none can be loaded,
    and some are damaged or marked as failed, it is a CorruptCheckpointError.
    """
    damaged = len(without)
    for step in reversed(folder.steps()):
        if step in without:
            continue
        found = folder.inspect_step(step)
        if found.refusal is not None:
            raise found.refusal
        if found.has_failed:
            logger.warning(
                "step %d in %s is skipped, %s; to load it all the same, name it, or verify it with --mark again",
                step,
                folder,
                found.mark,
            )
            report_skipped(folder.path(step), str(found.mark))
            damaged += 1
            continue
        if found.error is None:
            return step
        if isinstance(found.error, StorageError):
            raise _explain_unread(folder, step, found.error)
        what = "damaged" if found.is_damaged else "not a complete checkpoint"
        logger.warning("step %d in %s is skipped, %s: %s", step, folder, what, found.error)
        if found.is_damaged:
            report_skipped(folder.path(step), str(found.error))
            damaged += 1
    if damaged:
        raise CorruptCheckpointError(
            f"{folder}: no checkpoint there can be loaded, and {damaged} are damaged or failed a verification (the "
            "log names them); to start "
            "the training from the beginning, move them away or give another folder"
        )
    return None


def _explain_unread(folder: StepFolder, step: int, error: StorageError) -> CheckpointingException:
    """Return the error of a newest step that may be whole, with the newest whole one before it."""
    older = _find_older(folder, step)
    advice = f"; manager.load(step={older}) loads the newest whole one before it" if older >= 0 else ""
    return replace_text(error, f"step {step} in {folder} may be whole, but cannot be read now: {error}{advice}")

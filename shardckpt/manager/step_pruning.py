"""Removing the steps that retention policies do not keep, from outside of a training, with a reason for each step."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardckpt.engine import Progress, measure_freed
from shardckpt.errors import CheckpointingException, name_known
from shardckpt.manager.garbage_collection import find_held, remove_steps
from shardckpt.manager.retention import (
    RETENTION,
    find_needed_steps,
    refuse_unknown_metrics,
    steps_to_remove,
)
from shardckpt.manager.step_names import NAMINGS, parse_step
from shardckpt.manager.steps import StepFolder
from shardckpt.plugins import get_plugin_manager

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shardckpt.manager.retention import RetentionPolicy, StepMetrics
    from shardckpt.manager.steps import StepCheckpoint


@dataclass(frozen=True)
class StepResult:
    """A step's checkpoint, and whether it was removed.

    Attributes:
        path: Its path or URL; a password is masked.
        step: The step.
        kept: Why it is kept; ``""`` if it is not: it was removed, or with ``dry_run`` would be.
        error: Why it could not be removed; ``""`` if it could.
        nbytes: Bytes on disk that its removal frees.
    """

    path: str
    step: int
    nbytes: int = 0
    kept: str = ""
    error: str = ""


def prune_steps(
    folder: str | os.PathLike[str],
    policies: Collection[RetentionPolicy],
    protected: Collection[int] = (),
    *,
    names: str | None = None,
    dry_run: bool = False,
) -> list[StepResult]:
    """Remove the checkpoints of steps that no policy keeps. Not collective: one process calls.

    The rules are those of a CheckpointManager: only complete checkpoints that can be loaded here are counted and
    removed, no link, no damaged one, none that is leased or pinned, and never the newest, nor the newest verified one.
    Directories of each way to name steps (``step-<n>``, ``iter_<n>``, ``ckpt_<n>``, ...) are counted separately. A
    killed removal is finished by the next one.

    Args:
        folder: The directory or URL that has the steps' directories.
        policies: Choose the steps to keep; at least one.
        protected: Steps that are kept whatever the policies say.
        names: What the steps' names have before the number, such as ``model-``; by default any text that ends with a
            word that trainers use (step, iter, epoch, ckpt, checkpoint, ...).
        dry_run: Remove nothing; report what would be removed.

    Returns:
        Every step that has a directory, in ascending order, for each way to name them.

    Raises:
        CheckpointingException: no step has a value of the metric of a KeepBest, or there is no such step as a protected
            one: nothing was removed.
        StorageError: the folder cannot be listed.
    """
    folders = StepFolder(folder, get_plugin_manager()).list_namings(names)
    found = [(steps, each) for steps in folders if (each := {n: steps.inspect_step(n) for n in steps.steps()})]
    if not found:
        return []
    existing = {step for _, each in found for step in each}
    if absent := sorted({*protected} - existing):
        known = name_known(str(absent[0]), [*map(str, sorted(existing))], "steps")
        raise CheckpointingException(
            f"{folder} has no step {absent[0]} that could be kept, and nothing was removed {known}"
        )
    refuse_unknown_metrics(policies, [s.metrics for _, each in found for s in each.values() if s.is_loadable])
    return [result for steps, each in found for result in _prune(steps, each, policies, protected, dry_run=dry_run)]


def remove_step(path: str | os.PathLike[str]) -> StepResult:
    """Remove the checkpoint of one step. Not collective: one process calls.

    The rules are those of :func:`prune_steps`: a step that a load would take next, or that is held, stays.

    Args:
        path: The step's directory or URL, with any name of a step (``step-<n>``, ``iter_<n>``, ...).

    Returns:
        What became of it.

    Raises:
        CheckpointingException: the name is not a step's.
        StorageError: the folder that has it cannot be listed.
    """
    folder, _, name = os.fspath(path).rstrip("/").rpartition("/")
    parent = StepFolder(folder or ("/" if os.fspath(path).startswith("/") else "."), get_plugin_manager())
    steps = next((each for each in parent.list_namings() if each.names.parse(name) is not None), None)
    step = parse_step(name)
    if step is None:
        known = ", ".join(f"{each.prefix}<n>" for each in NAMINGS)
        raise CheckpointingException(f"{path}: its name is not a step's ({known}): nothing is removed")
    if steps is None or step not in steps.steps():
        return StepResult(str(path), step, kept="it does not exist")

    def keep_others(checkpoints: StepMetrics) -> list[int]:
        return [each for each in checkpoints if each != step]

    found = {each: steps.inspect_step(each) for each in steps.steps()}
    return next(each for each in _prune(steps, found, [keep_others], (), dry_run=False) if each.step == step)


def _prune(
    folder: StepFolder,
    found: Mapping[int, StepCheckpoint],
    policies: Collection[RetentionPolicy],
    protected: Collection[int],
    *,
    dry_run: bool,
) -> list[StepResult]:
    counted: StepMetrics = {}

    def choose(checkpoints: StepMetrics) -> list[int]:
        nonlocal counted
        counted = dict(checkpoints)
        return steps_to_remove(policies, checkpoints, protected)

    sizes = {step: measure_freed(folder.path(step)) for step in found}
    kept: dict[int, str] = {}
    if dry_run:
        links = {step for step in found if (folder.place / folder.names.name(step)).is_symlink()}
        wanted = set(choose({s: each.metrics for s, each in found.items() if each.is_loadable and s not in links}))
        held = find_held(folder)
        kept = {step: held[name] for step in wanted if (name := folder.names.name(step)) in held}
        removed = wanted - kept.keys()
    else:
        done, kept = _remove(folder, choose, sizes)
        removed = set(done)
        wanted = set(steps_to_remove(policies, counted, protected))
    results = []
    for step, each in found.items():
        result = StepResult(str(folder.place / folder.names.name(step)), step, sizes[step])
        if step not in counted:
            fault = each.error or each.refusal
            result = replace(result, kept=str(fault).splitlines()[0] if fault else "it is a link")
        elif step not in wanted:
            result = replace(result, kept=_explain_kept(step, policies, counted, protected))
        elif step in kept:
            result = replace(result, kept=kept[step])
        elif step not in removed:
            result = replace(result, error="it could not be removed: the log says why; the next prune tries again")
        results.append(result)
    return results


def _remove(
    folder: StepFolder, choose: Callable[[StepMetrics], list[int]], sizes: Mapping[int, int]
) -> tuple[Collection[int], dict[int, str]]:
    """Remove the chosen steps, and report the bytes that are done; return as ``remove_steps`` does."""
    progress: list[Progress] = []

    def begin(checkpoints: StepMetrics) -> list[int]:
        chosen = choose(checkpoints)
        total = sum(sizes.get(step, 0) for step in chosen)
        progress.append(Progress("prune", folder.place, total, get_plugin_manager()))
        return chosen

    return remove_steps(folder, begin, count_step=lambda step: progress[-1].add(sizes.get(step, 0)))


def _explain_kept(
    step: int, policies: Collection[RetentionPolicy], counted: StepMetrics, protected: Collection[int]
) -> str:
    """Return what keeps a step, of all that do."""
    needed = find_needed_steps(counted)
    reasons = [needed[step]] if step in needed else []
    reasons += ["it is protected"] if step in protected else []
    for policy in policies:
        if step in {*policy(counted)}:
            said = RETENTION.describe(policy)
            options = ", ".join(f"{k}={v}" for k, v in said.items() if k != "policy") if isinstance(said, dict) else ""
            reasons.append(f"{said['policy']}({options})" if isinstance(said, dict) else said)
    return ", ".join(reasons)


__all__ = ["StepResult", "prune_steps", "remove_step"]

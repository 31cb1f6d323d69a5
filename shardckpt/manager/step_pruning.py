"""Removing the steps that retention policies do not keep, from outside of a training, with a reason for each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.engine.locations import measure_freed
from shardckpt.engine.progress import Progress
from shardckpt.errors import CheckpointingException, name_known
from shardckpt.manager.any_steps import AnySteps
from shardckpt.manager.damage import Damage, find_damage
from shardckpt.manager.garbage_collection import choose_steps, find_held, remove_steps
from shardckpt.manager.holds import find_step
from shardckpt.manager.retention import (
    explain_policy,
    find_kept,
    find_needed_steps,
    refuse_unknown_metrics,
    steps_to_remove,
)
from shardckpt.manager.step_links import find_moves, find_own_links
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection

    from shardckpt.manager.garbage_collection import Choice, Judge, Removals
    from shardckpt.manager.marks import Mark
    from shardckpt.manager.retention import RetentionPolicy, StepMetrics
    from shardckpt.manager.steps import StepCheckpoint, StepFolder


#: The reason for a step that its caller has verified, and why it stays without ``damaged``.
_FAILED = "damaged, as the verification before this prune has found"
_UNASKED = f"{_FAILED}: --damaged removes it"


@dataclass(frozen=True)
class StepResult:
    """A step's checkpoint, and whether it was removed.

    Attributes:
        path: Its path or URL; a password is masked.
        nbytes: Bytes on disk that its removal frees.
        kept: Why it is kept; ``""`` if it was removed, or with ``dry_run`` would be.
        error: Why it could not be removed.
        fault: Its damage, if it is removed for that, or could not be.
        is_sound: Whether it has no damage that ``damaged`` looks for.
        moves: The words and links ``latest`` and ``best`` that stood for it, each with the name of the step that it
            stands for without it, ``""`` for none.
    """

    path: str
    step: int
    nbytes: int = 0
    kept: str = ""
    error: str = ""
    fault: str = ""
    is_sound: bool = False
    moves: dict[str, str] = field(default_factory=dict)


def prune_steps(
    folder: str | os.PathLike[str],
    policies: Collection[RetentionPolicy],
    protected: Collection[int] | Mapping[int, str] = (),
    *,
    names: str | None = None,
    damaged: bool = False,
    older_than: float | None = None,
    failed: Collection[str] = (),
    unwritten: Mapping[str, Mark] | None = None,
    dry_run: bool = False,
) -> list[StepResult]:
    """Remove the checkpoints of steps that no policy keeps, and damaged ones. Not collective: one process calls.

    The rules are a CheckpointManager's: only complete checkpoints that can be loaded here are counted and removed, no
    link, no damaged one, none that is leased or pinned, and never the newest, nor the newest verified one. Checkpoints
    that :func:`list_checkpoints` calls whole count, too: the Hub's format, and DeepSpeed's. Directories of each way to
    name steps (``step-<n>``, ``iter_<n>``, ``ckpt_<n>``, ...) are counted separately. A killed removal is finished by
    the next one.

    With ``damaged``, steps that :func:`list_checkpoints` calls damaged or incomplete, or that are marked as failed, go,
    too, and policies do not count these. Steps that may still be written to stay; so do those that lack only
    ``metadata.json`` or ``shardckpt.json`` and can be mended, and all of them where no other step can be loaded.

    Args:
        folder: The directory or URL that has the steps' directories.
        policies: Choose the steps to keep; at least one, or with ``damaged`` none, which keeps all that are not.
        protected: Steps that are kept whatever the policies say; or the reason for each, by step.
        names: The text of the steps' names before the number, such as ``model-``; by default any text that ends with a
            word that trainers use (step, iter, epoch, ckpt, checkpoint, ...).
        damaged: Whether to remove damaged steps, and saves that did not end.
        older_than: Hours since the last write to such a step from which it is removed; by default 1.
        failed: Names of directories that were verified just now, and are damaged, of other libraries: such have no
            mark. No policy counts them, and they go only with ``damaged``.
        unwritten: Marks by the names of directories that were verified just now, and were not to be marked.
        dry_run: Remove nothing; report the removals that would be made.

    Returns:
        Every step that has a directory, in ascending order, for each way to name them.

    Raises:
        UnknownMetricError: no step has a value of the metric of a KeepBest: nothing was removed.
        CheckpointingException: there is no such step as a protected one: nothing was removed.
        StorageError: the folder cannot be listed.
    """
    check_annotated(prune_steps, locals())
    if older_than is not None and not older_than >= 0:  # NaN, too
        raise CheckpointingException(f"older_than={older_than}: give hours, 0 or more")
    folders = AnySteps(folder, get_plugin_manager()).list_namings(names)
    for one in folders:
        one.unwritten = unwritten or {}
    found = [(steps, each) for steps in folders if (each := steps.inspect_steps()[0])]
    if not found:
        return []
    existing = {step for _, each in found for step in each}
    reasons = protected if isinstance(protected, Mapping) else dict.fromkeys(protected, "the caller protects it")
    if absent := sorted({*protected} - existing):
        known = name_known(str(absent[0]), [*map(str, sorted(existing))], "steps")
        raise CheckpointingException(
            f"{folder} has no step {absent[0]} that could be kept, and nothing was removed {known}"
        )
    refuse_unknown_metrics(policies, [s.metrics for _, each in found for s in each.values() if s.is_loadable])

    def judge(steps: StepFolder, step: StepCheckpoint) -> Damage | None:
        if steps.names.name(step.step) in failed:
            fault: Damage | None = Damage(_FAILED, _UNASKED * (not damaged))
        else:
            fault = find_damage(steps, step, older_than) if damaged else None
        return fault._replace(kept=reasons[step.step]) if fault is not None and step.step in reasons else fault

    return [
        result
        for steps, each in found
        for result in _prune(steps, each, policies, reasons, partial(judge, steps), dry_run=dry_run)
    ]


def remove_step(folder: str | os.PathLike[str], step: int | str) -> StepResult:
    """Remove the checkpoint of one step, and return the result. Not collective: one process calls.

    The rules are as for :func:`prune_steps`: a step that a load would take next, or that is held, stays. ``step`` is
    the step, or the name of its directory, as :func:`pin_step` takes it; it is an error if several directories are of
    this step.
    """
    steps, step = find_step(folder, step)
    if step not in steps.steps():
        return StepResult(str(steps.place / steps.names.name(step)), step, kept="it does not exist")

    def keep_others(checkpoints: StepMetrics) -> list[int]:
        return [each for each in checkpoints if each != step]

    found, _ = steps.inspect_steps()
    return next(each for each in _prune(steps, found, [keep_others], {}, dry_run=False) if each.step == step)


def _prune(
    folder: StepFolder,
    found: Mapping[int, StepCheckpoint],
    policies: Collection[RetentionPolicy],
    protected: Mapping[int, str],
    judge: Judge = lambda _: None,
    *,
    dry_run: bool,
) -> list[StepResult]:
    def choose(checkpoints: StepMetrics) -> list[int]:
        return steps_to_remove(policies, checkpoints, protected)

    sizes = {step: measure_freed(folder.path(step)) for step in found}
    if dry_run:
        choice = choose_steps(folder, choose, judge)
        wanted = {*choice.chosen, *choice.doomed}
        held = find_held(folder, own_links=find_own_links(folder, choice.found.values()))
        kept = {step: held[name] for step in wanted if (name := folder.names.name(step)) in held}
        removed = wanted - kept.keys()
    else:
        done, kept, choice = _remove(folder, choose, judge, sizes)
        wanted = {*choice.chosen, *choice.doomed}
        removed = set(done)
    before = choice.found.values()
    moves = find_moves(folder, before, [each for each in before if each.step not in removed])
    results = []
    for step, each in found.items():
        is_sound = step in choice.counted and not each.has_failed
        result = StepResult(str(folder.place / folder.names.name(step)), step, sizes[step], is_sound=is_sound)
        if step not in wanted:
            result = replace(result, kept=_explain_kept(each, choice, policies, protected))
        elif step in kept:
            result = replace(result, kept=kept[step])
        elif step not in removed:
            result = replace(result, error="it could not be removed: the log says why; the next prune tries again")
        if step in choice.damage and not result.kept:
            result = replace(result, fault=choice.damage[step].fault)
        results.append(replace(result, moves=moves.get(folder.names.name(step), {})))
    return results


def _remove(
    folder: StepFolder, choose: Callable[[StepMetrics], list[int]], judge: Judge, sizes: Mapping[int, int]
) -> Removals:
    """Remove the chosen steps, and report the bytes that are done; return as ``remove_steps`` does."""

    def begin(chosen: Collection[int]) -> Callable[[int], None]:
        total = sum(sizes.get(step, 0) for step in chosen)
        progress = Progress("prune", folder.place, total, get_plugin_manager())
        return lambda step: progress.add(sizes.get(step, 0))

    return remove_steps(folder, choose, judge=judge, begin=begin)


def _explain_kept(
    found: StepCheckpoint, choice: Choice, policies: Collection[RetentionPolicy], protected: Mapping[int, str]
) -> str:
    """Return the reasons to keep a step that was not chosen."""
    step, counted = found.step, choice.counted
    if (damage := choice.damage.get(step)) is not None:
        return damage.kept or f"{damage.fault}; no step that is whole is left without it"
    if step not in counted:
        fault = found.error or found.refusal
        said = str(fault).splitlines()[0] if fault else "it is a link"
        return f"damaged: {said}; --damaged says whether it may go" if found.is_damaged else said
    if not policies:
        return str(found.mark or "it has all its files, by their sizes")
    needed = find_needed_steps(counted)
    reasons = [needed[step]] if step in needed else []
    reasons += [protected[step]] if step in protected else []
    for policy in policies:
        if step in find_kept(policy, counted):
            reasons.append(explain_policy(policy))
    if found.has_failed:
        reasons.append(f"{found.mark}: --damaged removes it")
    return ", ".join(reasons)

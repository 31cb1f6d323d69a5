"""Garbage collection: removes checkpoints that no policy keeps, in a thread.

The process may be killed at any moment. So one step makes a checkpoint unloadable before its files are deleted: a
rename to a tombstone or, on a store, the deletion of its ``metadata.json``. The next collection deletes the remains.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.commit.leftovers import find_leftovers, remove_unused
from shardckpt.commit.removal import is_half_deleted, remove_checkpoint
from shardckpt.commit.staging_names import REMOVED, stem
from shardckpt.commit.unfinished import explain_unfinished_kept, find_unfinished
from shardckpt.engine.operation import report_failed
from shardckpt.engine.pruning import clear_unfinished, clear_uploads, explain_kept_leftover, make_superseded_check
from shardckpt.errors import CheckpointingException, CheckpointReplacedError, StorageError, is_first_warning, listed
from shardckpt.manager.marks import drop_marks
from shardckpt.manager.retention import find_needed_steps, steps_to_remove
from shardckpt.manager.step_links import find_own_links, update_links
from shardckpt.manager.step_names import MARKS_NAME
from shardckpt.storage.abilities import find_ability, has_links, takes_requests
from shardckpt.storage.remote import ListsFolders

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from shardckpt.commit.staging_names import Leftover
    from shardckpt.manager.damage import Damage
    from shardckpt.manager.marks import StepState
    from shardckpt.manager.retention import Metrics, RetentionPolicy, StepMetrics
    from shardckpt.manager.steps import StepCheckpoint, StepFolder

logger = logging.getLogger(__name__)

#: The states of a step that a verification can give it, the worst first.
_STATES: tuple[StepState, ...] = ("failed", "candidate", "verified")

#: Seconds after which :meth:`GarbageCollector.wait` warns and names the reason for the wait, and after which
#: :func:`discard_steps_after` warns that it waits for the removals of another process.
_PATIENCE = 5.0


def collect_garbage(
    folder: StepFolder,
    policies: Collection[RetentionPolicy],
    protected: Collection[int] = (),
    *,
    links: bool = False,
    clean: set[int] | None = None,
) -> list[int]:
    """Remove the steps that no policy keeps, and remains of killed saves and removals; return the removed steps.

    Without policies all are kept, and the folder's links are updated only if ``links`` is True. Steps in ``protected``
    are kept whatever the policies return. A policy that returns something other than steps is an error, and nothing is
    removed.

    Without policies, the steps in ``clean`` are not searched for remains on a store, where each search is a request;
    those without remains are added to it.
    """
    if not policies and not links:  # no checkpoint need be inspected, and there may be many
        clean = set() if clean is None else clean
        steps = [step for step in folder.steps() if step not in clean] if takes_requests(folder.place) else []
        left = _remove_leftovers(folder, steps)
        clean.update(step for step in steps if folder.names.name(step) not in left)
        return []
    return remove_steps(folder, lambda checkpoints: steps_to_remove(policies, checkpoints, protected)).removed


class Choice(NamedTuple):
    """The steps of a folder, and which of them are to be removed.

    Attributes:
        found: All steps.
        counted: The metrics of the steps that policies choose from, in ascending order.
        chosen: The steps of ``counted`` that are to be removed.
        damage: The damage of other steps, and why some of these stay.
        needed: The steps for whose sake the others can go: a load takes one of them then.
        known: The steps that were not inspected again.
    """

    found: dict[int, StepCheckpoint]
    counted: dict[int, Metrics]
    chosen: list[int]
    damage: dict[int, Damage]
    needed: list[int]
    known: Collection[int]

    @property
    def doomed(self) -> list[int]:
        """The damaged steps that are to go; none, if without them nothing whole would be left."""
        return [step for step, damage in self.damage.items() if not damage.kept] if self.needed else []


class Removals(NamedTuple):
    """The outcome for the steps that were chosen to be removed.

    A step that is neither removed nor kept could not be removed: a warning has said why.

    Attributes:
        removed: Those that were removed, in the order of the choice.
        kept: Why others stay, by step.
        choice: The steps that were chosen, and from which.
    """

    removed: list[int]
    kept: dict[int, str]
    choice: Choice


#: Returns the damage of a step, if it is of a kind for which steps are removed.
Judge = Callable[["StepCheckpoint"], "Damage | None"]


def choose_steps(
    folder: StepFolder, choose: Callable[[StepMetrics], Collection[int]], judge: Judge = lambda _: None
) -> Choice:
    """Look at all steps, and choose those to be removed; see :func:`remove_steps`."""
    found, known = folder.inspect_steps()
    # No link: the rename would make a tombstone of the link, and leave the files where they are.
    places = {step: each for step, each in found.items() if not (folder.place / folder.names.name(step)).is_symlink()}
    damage = {step: fault for step, each in places.items() if (fault := judge(each)) is not None}
    counted = {step: each.metrics for step, each in places.items() if each.is_loadable and step not in damage}
    chosen = [step for step in choose(counted) if step in counted]
    needed = find_needed_steps({step: metrics for step, metrics in counted.items() if step not in chosen})
    return Choice(found, counted, chosen, damage, [*needed], known)


def remove_steps(
    folder: StepFolder,
    choose: Callable[[StepMetrics], Collection[int]],
    *,
    judge: Judge = lambda _: None,
    keeps_linked: bool = True,
    begin: Callable[[Collection[int]], Callable[[int], None]] = lambda _: lambda _: None,
) -> Removals:
    """Remove the checkpoints that a function chooses, and the remains of killed saves and removals; return the outcome.

    ``choose`` takes the metrics by step of complete checkpoints that can be loaded here, and returns the steps to
    remove. Only those are removed, and those in which ``judge`` finds damage, if nothing in it says why they stay; the
    damaged are not given to ``choose``. By default ``judge`` looks at none. No save under way is removed, no symbolic
    link, none that a lease or a pin holds; and with ``keeps_linked`` none that a symbolic link in the folder leads to.
    The remains of a save are left while its process lives. A warning names the checkpoints that cannot be removed; the
    next call tries again. ``begin`` is called with the chosen steps, and returns a function that is called with each of
    them when it is removed, or stays.

    Other processes may save and remove meanwhile. So each step is inspected again under the mark of its removal: it
    stays if it is another save by then, or if a checkpoint for whose sake it could go is gone, or going.
    """
    choice = choose_steps(folder, choose, judge)
    chosen = [*choice.chosen, *choice.doomed]
    needed = [choice.found[each] for each in choice.needed]
    own_links = find_own_links(folder, choice.found.values())
    held = find_held(folder, keeps_linked=keeps_linked, own_links=own_links) if chosen else {}
    if own_links:  # before their targets are gone
        update_links(folder, [each for step, each in choice.found.items() if step not in chosen])
    if chosen:
        # A checkpoint that a killed overwrite moved aside is known to be old while the step is there; else it is kept.
        _remove_local(folder, [leftover for leftover in _find_local(folder) if leftover.is_replaced])
    removed, kept, count_step = [], {}, begin(chosen)
    for step in chosen:
        if against := held.get(folder.names.name(step)):  # no mark need be written for it
            reason: str | None = against
        else:
            reason = _try_to_remove(folder, choice.found[step], needed, judge)
        if reason:
            kept[step] = reason
        elif reason is not None:
            removed.append(step)
            folder.forget(step)  # on a store its folder is there as long as any object is in it
        count_step(step)
    if own_links and len(removed) < len(chosen):
        update_links(folder, [each for step, each in choice.found.items() if step not in removed])
    left = _clear_remains(folder, choice, judge, removed)
    for step in removed:
        if stem(folder.names.name(step)) not in left:  # else a warning says that its files take space still
            logger.info("removed step %d from %s", step, folder)
    return Removals(removed, kept, choice)


def find_held(folder: StepFolder, *, keeps_linked: bool = True, own_links: Collection[str] = ()) -> dict[str, str]:
    """Return the holds of steps by the names of their directories: leases, pins, and links to them.

    With ``keeps_linked`` a symbolic link in the folder keeps its target (``best -> step-100``), but not a link of
    ``own_links``, because they are moved: :func:`~shardckpt.manager.step_links.find_own_links`.
    """
    found = {name: list(map(str, holds)) for name, holds in folder.holds.find().items()}
    if keeps_linked and has_links(folder.place) and folder.place.is_dir():
        place = folder.place.resolve()
        for link in sorted(each for each in folder.place.iterdir() if each.is_symlink() and each.name not in own_links):
            with suppress(OSError, RuntimeError):  # a link to itself leads nowhere
                if (target := link.resolve()).parent == place:
                    found.setdefault(target.name, []).append(f"{link.name} is a link to it")
    return {name: ", ".join(reasons) for name, reasons in found.items()}


def discard_steps_after(folder: StepFolder, step: int) -> list[int]:
    """Remove the checkpoints of all steps after one; return them in ascending order.

    If no complete checkpoint up to this step would be left, or a later one is held or a symbolic link, that is an
    error, and nothing is removed. It is an error, too, if some could not be removed: a load would take the newest.
    """
    later = [each for each in folder.steps() if each > step]
    if not later:
        return []
    earlier = (folder.inspect_step(each) for each in folder.steps() if each <= step)
    if not any(each.is_sound for each in earlier):
        raise CheckpointingException(
            f"{folder}: no step up to {step} can be loaded and has not failed a verification, so that none would be "
            f"left without the later ones: {listed([*map(str, later)])}"
        )
    holds = folder.holds.find()
    held = {each: holds[name] for each in later if (name := folder.names.name(each)) in holds}
    if held:
        said = [f"step {each} is {hold}" for each, found in held.items() for hold in found]
        raise CheckpointingException(
            f"{folder}: nothing was removed, since steps after {step} are held: {listed(said, '; ')}; end these holds "
            "first"
        )
    links = [each for each in later if (folder.place / folder.names.name(each)).is_symlink()]
    if links:
        raise CheckpointingException(
            f"{folder}: nothing was removed, since steps after {step} are symbolic links, whose files are elsewhere: "
            f"{listed([*map(str, links)])}; remove these links first"
        )
    # the newest first: after a kill a restart does not find the steps that were left longest ago
    deadline = time.monotonic() + _PATIENCE
    removed: set[int] = set()
    while True:
        done, kept, _ = remove_steps(
            folder, lambda found: sorted((s for s in found if s in later), reverse=True), keeps_linked=False
        )
        removed.update(done)
        left = [each for each in later if each not in removed and folder.inspect_step(each).is_loadable]
        # A collection of another process, before which this one gave way: it takes a rename for each step.
        if not left or not folder.holds.find_removals() or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if left:
        said = [f"step {each} ({kept.get(each, 'see the log')})" for each in left]
        raise StorageError(
            f"{folder}: of the steps after {step}, these could not be removed: {listed(said, '; ')}; a load would take "
            "the newest of them: remove them, or call again"
        )
    return sorted(removed)


class GarbageCollector:
    """Collects garbage in a thread. A folder has at most one, in one process."""

    def __init__(self, folder: StepFolder, policies: Collection[RetentionPolicy], *, links: bool = False) -> None:
        self._folder = folder
        self._policies = policies
        self._links = links
        self._queue: queue.Queue[Collection[int] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._clean: set[int] = set()
        #: The error of the last collection; ``""`` if it went well.
        self._failure = ""

    def submit(self, protected: Iterable[int] = ()) -> None:
        """Start a collection in the thread, and return at once; ``protected`` is as for :func:`collect_garbage`.

        Where the system lets no more threads start, the calling thread collects before this returns.
        """
        if self._closed:
            raise CheckpointingException(f"the garbage collector of {self._folder} is closed")
        self._queue.put(frozenset(protected))
        if self._thread is None:
            # A daemon: a program that does not call `close` ends all the same; the next run finishes the removals.
            thread = threading.Thread(target=self._run, name="shardckpt-gc", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process has as many as the system or its container lets it have
                self._queue.put(None)
                self._run()
            else:
                self._thread = thread

    def wait(self) -> None:
        """Wait until all submitted collections are done; a warning says so if it takes longer than a few seconds."""
        # Only the main rank has a collector. The others cannot wait by themselves: they stand in their next collective,
        # and if a file system hangs, its timeout ends the job. The warning then names the cause.
        text = (
            "still waiting for old checkpoints in %s to be removed; all ranks wait, at most until the process group's "
            "timeout: does the file system answer?"
        )
        warning = threading.Timer(_PATIENCE, logger.warning, (text, self._folder))
        warning.daemon = True
        with suppress(RuntimeError):  # no more threads can be started
            warning.start()
        try:
            self._queue.join()
        finally:
            warning.cancel()

    def close(self, timeout: float = 600.0) -> None:
        """Finish the submitted collections, and end the thread.

        After ``timeout`` seconds a warning is logged, and the next run finishes the removals.
        """
        closed, self._closed = self._closed, True
        if self._thread is None or closed:
            return
        self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("removals in %s take longer than %s s: the next run finishes them", self._folder, timeout)

    def _run(self) -> None:
        self._clear_uploads()
        for protected in iter(self._queue.get, None):
            try:
                self._collect(protected)
            finally:
                self._queue.task_done()
        self._queue.task_done()  # of the None that ends the loop, so that a later `wait` returns

    def _collect(self, protected: Collection[int]) -> None:
        """Collect, and log failures: no error may end the training or this thread. The next collection retries.

        A policy that exits would end the thread alone, without a word, and all ranks would wait for it.
        """
        try:
            collect_garbage(self._folder, self._policies, protected, links=self._links, clean=self._clean)
        except (Exception, SystemExit) as exc:
            text = f"{type(exc).__qualname__}: {exc}"
            if text != self._failure:  # a policy that raises does so after each save
                logger.warning("cannot remove old checkpoints from %s: %s", self._folder, exc, exc_info=True)
            report_failed("prune", self._folder, exc, "removing old steps")
            self._failure = text
        else:
            self._failure = ""

    def _clear_uploads(self) -> None:
        """Abort, once in a training, the old uploads of saves that have left nothing else."""
        try:
            clear_uploads(self._folder.place, self._folder.plugins, dry_run=False)
        except (Exception, SystemExit):  # as in a collection
            logger.warning("cannot look for uploads to %s that have not ended", self._folder, exc_info=True)


def _report_kept(path: Path, error: Exception, phase: str, text: str) -> None:
    """Report a failed removal: each time as an event, and once in the log, as each collection tries again."""
    if is_first_warning(__name__, text):
        logger.warning("%s", text)
    report_failed("prune", path, error, phase)


def _clear_remains(folder: StepFolder, choice: Choice, judge: Judge, removed: Collection[int]) -> set[str]:
    """Remove the leftovers of killed saves and removals, and the holds and marks that have ended.

    Return the result of :func:`_remove_leftovers`.
    """
    for each in choice.found.values():
        # A removal that was killed on a store without rename leaves a checkpoint without some of its objects.
        if each.error is not None and is_half_deleted(folder.path(each.step)):
            _try_to_remove(folder, each, [], judge)
    if removed or not choice.known:  # the leftovers of other processes go with the next removal
        folder.holds.drop_ended()
        drop_marks(folder.find(MARKS_NAME), folder.directories)
    return _remove_leftovers(folder, [step for step in choice.found if step not in choice.known])


def _remove_leftovers(folder: StepFolder, steps: Iterable[int]) -> set[str]:
    """Remove tombstones, staging directories and objects of killed saves; leave those whose process may live.

    Return the stems of the names of removed steps whose tombstones could not be deleted; on a store, the names of steps
    in whose places something was left. There only the places of ``steps`` are searched: objects in the place of a step
    that was whole before are left to the next manager.
    """
    place = folder.place
    if not takes_requests(place):
        return _remove_local(folder, _find_local(folder))
    results = clear_unfinished(place, map(folder.names.name, steps), folder.plugins, dry_run=False)
    for result in results:
        if result.error:
            _report_kept(place, StorageError(result.error), "removing leftovers", result.error)
        elif result.is_removed:
            logger.info("removed the objects at %s, which an interrupted save or removal had left", result.path)
    return {result.path.name for result in results if not result.is_removed}


def _find_local(folder: StepFolder) -> list[Leftover]:
    """Return the tombstones and staging directories of steps in a directory."""

    def is_step(stem: str) -> bool:
        # Older releases made tombstones of staging directories, too: their stem is `.step-1.shardckpt-...`.
        return folder.names.parse(stem.removeprefix(".").partition(".shardckpt-")[0]) is not None

    return find_leftovers(folder.place, is_step)


def _remove_local(folder: StepFolder, leftovers: Iterable[Leftover]) -> set[str]:
    """Remove the leftovers that may go; return as :func:`_remove_leftovers`."""
    is_superseded, left = make_superseded_check(folder.plugins), set[str]()

    def report(leftover: Leftover, error: Exception) -> None:
        if leftover.kind == REMOVED:
            left.add(leftover.stem)
        _report_kept(folder.place, error, "removing leftovers", str(error))

    remove_unused(
        leftovers,
        lambda leftover: explain_kept_leftover(leftover, folder.place / leftover.stem, is_superseded),
        report,
    )
    return left


def _try_to_remove(
    folder: StepFolder, chosen: StepCheckpoint, needed: Collection[StepCheckpoint], judge: Judge
) -> str | None:
    """Remove a checkpoint, unless it must stay by now: return why, ``""`` if it was removed, None if that failed.

    A failure is logged as a warning. ``chosen`` and ``needed``, those for whose sake it can go, are as they were when
    it was chosen.
    """
    name = folder.names.name(chosen.step)
    path = folder.find_entry(name)
    try:
        with folder.holds.removing(name, [folder.names.name(each.step) for each in needed]) as against:
            # The marks were read before the checkpoints are inspected: a removal that ends in between is then seen.
            if against:
                what = [f"{'it' if each.directory == name else each.directory} is {each}" for each in against]
                reason, level = ", ".join(what), logging.INFO
            else:
                reason, level = _find_change(folder, chosen, needed, judge), logging.WARNING
            if reason:
                logger.log(level, "step %d in %s stays for now: %s", chosen.step, folder, reason)
                return reason
            remove_checkpoint(path)
            if (store := find_ability(folder.place, ListsFolders)) is not None:  # its folders outlive their objects
                store.remove_folder(name)
    except (StorageError, CheckpointReplacedError) as exc:
        text = f"step {chosen.step} in {folder} is to be removed, and stays for now: {exc}"
        _report_kept(path, exc, "removing a step", text)
        return None
    return ""


def _find_change(folder: StepFolder, chosen: StepCheckpoint, needed: Collection[StepCheckpoint], judge: Judge) -> str:
    """Return the event since a step was chosen that forbids its removal; ``""`` without one."""
    path, now = folder.path(chosen.step), folder.inspect_step(chosen.step)
    if not chosen.is_sound and (damage := judge(now)) is not None:
        return damage.kept or _find_loss(folder, needed)
    if chosen.error is not None:
        return "" if is_half_deleted(path) else "another process has removed it, or saves it anew"
    if not now.is_same_save(chosen):
        return "since it was chosen it was saved anew" if now.is_loadable else "since it was chosen it was removed"
    if now.mark != chosen.mark:  # by it policies choose
        return f"since it was chosen it was {now.mark or 'marked anew'}"
    begun = find_unfinished(path)  # on a store, the objects of a save that replaces it are below its URL
    if begun is not None and begun.owners and (reason := explain_unfinished_kept(begun)):
        return f"it is being saved anew: {reason}"
    return _find_loss(folder, needed)


def _find_loss(folder: StepFolder, needed: Collection[StepCheckpoint]) -> str:
    """Return the event since then that changed a step that was to stay; ``""`` without one."""
    for each in needed:
        now = folder.inspect_step(each.step)
        if not now.is_loadable:
            return f"since it was chosen, step {each.step}, which was to stay, was removed or damaged"
        if _STATES.index(now.metrics.state) < _STATES.index(each.metrics.state):
            return f"since it was chosen, step {each.step}, which was to stay, became {now.metrics.state}"
    return ""

"""The folder of a training's checkpoints: the names of the steps' directories, and which can be loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.commit.holds import Holds
from shardckpt.commit.small_files import SmallFiles
from shardckpt.commit.staging_names import HOLDS_NAME
from shardckpt.engine.integrity import find_incomplete_files, list_recorded_files
from shardckpt.engine.locations import find_save_time, locate
from shardckpt.errors import (
    CannotLoadError,
    CheckpointingException,
    CheckpointReplacedError,
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsafePickleError,
    format_many,
    listed,
)
from shardckpt.manager.marks import find_mark, name_mark
from shardckpt.manager.metrics import read_managed, read_metrics, read_save_time
from shardckpt.manager.retention import Metrics
from shardckpt.manager.step_names import MARKS_NAME, STEPS, StepNames, find_namings
from shardckpt.manifest.names import RECORD_NAME
from shardckpt.plugins.resolver import choose_reader, hold_checkpoint
from shardckpt.storage.abilities import has_links, takes_requests
from shardckpt.storage.directory import detect_replacement, retry_if_replaced
from shardckpt.storage.filesystem import file_size, wrap_os_errors
from shardckpt.storage.places import attach_listing, get_url, list_by_folder, list_folders
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.remote import map_requests

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from typing_extensions import Self

    from shardckpt.manager.marks import Mark
    from shardckpt.manifest.models import Manifest
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.strategy import LoadStrategy

_E = TypeVar("_E", bound=CheckpointingException)

#: The key, in the dict under CONTENT_KEY, of the prefix of the model's tensor keys; where it is absent, the prefix is
#: MODEL_PREFIX.
PREFIX_KEY = "model_prefix"
#: Where it has the names of the states that were saved as PerRank.
PER_RANK_KEY = "per_rank"
MODEL_PREFIX = "model."


class MissingStatesError(CannotLoadError):
    """A manager's checkpoint that lacks states which are to be loaded."""


@dataclass(frozen=True)
class StepCheckpoint:
    """The state of a step's directory, as known from its JSON files and the sizes of the others.

    Attributes:
        manifest: None if it cannot be read.
        error: Why it is not a complete checkpoint: it was never committed, or is damaged.
        refusal: Why no installed strategy can read a complete one.
        changed_at: When its last file was written, in seconds since 1970; None if it is not complete, or on a store.
        mark: The verdict of a verification of this save.
        has_lost_record: Whether its files say that it had a ``shardckpt.json``, which is gone: a load takes it, without
            digests, and it takes no whole step's place.
        foreign_metrics: Those that another library has noted for the step.
    """

    step: int
    manifest: Manifest | None = None
    error: CheckpointingException | None = None
    refusal: CannotLoadError | None = None
    changed_at: float | None = None
    mark: Mark | None = None
    has_lost_record: bool = False
    foreign_metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def is_loadable(self) -> bool:
        """Whether it is committed, has all its files, and an installed strategy can read it."""
        return self.error is None and self.refusal is None

    @property
    def has_failed(self) -> bool:
        """Whether a verification has marked it as failed."""
        return self.mark is not None and self.mark.verdict == "failed"

    @property
    def is_whole(self) -> bool:
        """Whether it is committed, has all its files, and no verification has marked it as failed."""
        return self.error is None and not self.has_failed

    @property
    def is_sound(self) -> bool:
        """Whether a load takes it: it can be loaded, and no verification has marked it as failed."""
        return self.is_loadable and self.is_whole

    @property
    def is_foreign(self) -> bool:
        """Whether it is complete, in a format that no manager loads: an :class:`AnySteps` finds such."""
        return self.error is None and self.manifest is None

    @property
    def is_damaged(self) -> bool:
        """Whether it was a complete checkpoint once; False also for a save that was never committed."""
        return self.error is not None and not isinstance(self.error, CannotLoadError | StorageError)

    @property
    def is_unread(self) -> bool:
        """Whether the file system refused to read it: it may be whole."""
        return isinstance(self.error, StorageError)

    def is_same_save(self, earlier: StepCheckpoint) -> bool:
        """Return whether this is the save that was found in the directory earlier, unchanged, and complete."""
        # Of another library's checkpoint, which has no record of its save, the time tells.
        return self.is_loadable and (self.manifest, self.changed_at) == (earlier.manifest, earlier.changed_at)

    @property
    def content(self) -> dict[str, Any]:
        """The ``content_metadata`` that it was saved with, or an empty dict."""
        record = self.manifest and self.manifest.record
        content = record and record.content_metadata
        return content if isinstance(content, dict) else {}

    @property
    def states(self) -> list[str]:
        """The names of the states that a CheckpointManager saved there; none where another program did."""
        stored = read_managed(self.content).get("states")
        return [name for name in stored if isinstance(name, str)] if isinstance(stored, list) else []

    @property
    def metrics(self) -> Metrics:
        """The metrics that ``CheckpointManager.save`` was given, or a Trainer logged, and when it was saved."""
        saved_at = read_save_time(self.content)
        return Metrics(
            read_metrics(self.content) or self.foreign_metrics,
            self.changed_at if saved_at is None else saved_at,
            "failed" if self.has_lost_record else "candidate" if self.mark is None else self.mark.verdict,
            is_foreign=self.is_foreign,
        )


class StepFolder:
    """A directory or URL that has a directory for each step; it need not exist yet. Everything else in it is ignored.

    No method is collective: the main rank calls them, and sends the results to the other ranks.
    """

    def __init__(self, folder: str | os.PathLike[str], plugins: PluginManager, names: StepNames = STEPS) -> None:
        #: The directory, or the store's folder.
        self.place = locate(folder, plugins)
        self.names = names
        #: The plugin manager.
        self.plugins = plugins
        #: Whole steps of a store that this object has inspected: to inspect one takes several requests.
        self._known: dict[int, StepCheckpoint] = {}
        #: Steps that proved damaged when they were read, though their files have the right sizes, each with the error.
        self.damaged: dict[int, str] = {}
        #: Marks by the names of directories that a dry run has not written, and that count as if it had.
        self.unwritten: Mapping[str, Mark] = {}

    @property
    def holds(self) -> Holds:
        """The leases and pins of the steps."""
        return Holds(self.find(HOLDS_NAME))

    def location(self, step: int) -> str:
        """Return a step's directory or URL for ``save`` and ``load``; a URL contains its password."""
        return get_url(self.place / self.names.name(step))

    def path(self, step: int) -> Path:
        """Return a step's directory or URL, with symbolic links resolved."""
        return self.find(self.names.name(step))

    def find_entry(self, name: str) -> Path:
        """Return the path of a name in the folder: a link itself; or a URL."""
        return self.place / name if has_links(self.place) else self.find(name)

    def find(self, name: str) -> Path:
        """Return any directory in the folder, or its URL, with symbolic links resolved."""
        return locate(get_url(self.place / name), self.plugins)

    def directories(self) -> list[str]:
        """Return the names of all directories in the folder, of steps or not; none if the folder does not exist."""
        return list_folders(self.place)

    def list_namings(self, prefix: str | None = None) -> list[Self]:
        """Return the folder once for each way in which steps are named in it; see :func:`find_namings`."""
        folder = get_url(self.place)
        return [type(self)(folder, self.plugins, names) for names in find_namings(self.directories(), prefix)]

    def steps(self) -> list[int]:
        """Return all steps that have a directory, in ascending order, whatever the directory contains."""
        return sorted(step for step in map(self.names.parse, self.directories()) if step is not None)

    def inspect_steps(self) -> tuple[dict[int, StepCheckpoint], set[int]]:
        """Inspect all steps, as :meth:`inspect_step` does; return the results, and the steps that were known before.

        On a store, several are inspected at a time. There a step that was whole and has no mark is not inspected again,
        until :meth:`forget`: before one is removed, it is inspected once more.
        """
        steps = self.steps()
        if not takes_requests(self.place):
            return {step: self.inspect_step(step) for step in steps}, set()
        marks = set(SmallFiles(self.find(MARKS_NAME)).names())
        known = {step for step in steps if step in self._known and name_mark(self.names.name(step)) not in marks}
        fresh = [step for step in steps if step not in known]
        # where most are new, one listing of the whole folder takes no more requests than one of each
        listings = list_by_folder(self.place) if len(fresh) > max(1, len(known)) else None

        def inspect(step: int) -> StepCheckpoint:
            if listings is not None:  # it may have been replaced or removed since: no whole step: list it anew
                directory = attach_listing(self.path(step), listings, self.names.name(step))
                try:
                    if (found := self.inspect_step(step, marks, directory)).is_loadable:
                        return found
                except StorageError as exc:
                    if not isinstance(exc.__cause__, FileNotFoundError):
                        raise
            return self.inspect_step(step, marks)

        looked_at = dict(zip(fresh, map_requests(inspect, fresh, "shardckpt-steps"), strict=True))
        found = {step: self._known[step] if step in known else looked_at[step] for step in steps}
        self._known = {step: each for step, each in found.items() if each.is_loadable}
        return found, known

    def forget(self, step: int | None = None) -> None:
        """Look at a step again, which was saved anew; by default, at all."""
        self._known = {each: found for each, found in self._known.items() if step not in (None, each)}
        self.damaged = {each: error for each, error in self.damaged.items() if step not in (None, each)}

    def is_taken(self, step: int) -> bool:
        """Return whether a load of the newest step would not skip this one, as far as is known."""
        try:
            found = self.inspect_step(step)
        except CheckpointingException:  # it is being replaced, or the store does not answer
            return True
        return found.is_unread or (found.error is None and not found.has_failed and step not in self.damaged)

    def find_fault(self, step: int) -> str:
        """Return the fault of a step that a save replaces; ``""`` if it has none, or no save was ever there."""
        try:
            found = self.inspect_step(step)
        except (CheckpointReplacedError, StorageError):  # the save itself will say it
            return ""
        except CheckpointingException as exc:
            found = StepCheckpoint(step, error=exc)
        why = self.damaged.get(step) or (found.mark if found.has_failed else found.error or found.refusal)
        if why is None or isinstance(why, NotACheckpointError):
            return ""
        state = "no readable checkpoint" if isinstance(why, CannotLoadError | StorageError) else "damaged"
        return f"{state} ({str(why).splitlines()[0]})"

    def inspect_step(
        self, step: int, marks: Collection[str] | None = None, directory: Path | None = None
    ) -> StepCheckpoint:
        """Inspect a step's directory: its JSON files, and that the other files exist with the right sizes.

        Another library's checkpoint has no record of its files: there its index says which they are. An error of the
        checkpoint is stored in the result, not raised. A StorageError is raised if the store does not answer, or if
        other saves replace the checkpoint repeatedly: neither says whether the checkpoint is good, so it must not be
        skipped as a damaged one. ``marks`` has the names of the marks that there are, if they are known, and
        ``directory`` is the step's, if it comes with a listing.
        """
        directory = directory or self.path(step)
        manifest: Manifest | None = None
        has_lost_record = False

        def check() -> Manifest:
            nonlocal manifest, has_lost_record
            manifest = None  # forget the one of an earlier attempt: the checkpoint was replaced since
            place, manifest = hold_checkpoint(directory, self.plugins)
            with detect_replacement(place):
                _check_files(place, manifest)
            strategy = choose_reader(directory, manifest, self.plugins)
            if manifest.record is None:
                has_lost_record = _check_indexed_files(place, manifest, strategy)
            return manifest

        try:
            with wrap_os_errors("inspect", directory):
                found = retry_if_replaced(check, directory)
        except (StorageError, CorruptCheckpointError) as exc:
            no_answer = takes_requests(directory) and isinstance(exc, StorageError)
            if no_answer or isinstance(exc, CheckpointReplacedError):
                raise
            return StepCheckpoint(step, manifest, error=_without_frames(exc))
        except CannotLoadError as exc:
            if manifest is None:
                return StepCheckpoint(step, error=_without_frames(exc))
            return StepCheckpoint(step, manifest, refusal=_without_frames(exc))
        name = self.names.name(step)
        has_mark = marks is None or name_mark(name) in marks
        mark = self.unwritten.get(name)
        if mark is None and has_mark:
            mark = find_mark(self.find(MARKS_NAME), name, found.record)
        changed_at = None
        with suppress(StorageError, OSError):  # it was replaced or removed meanwhile
            changed_at = find_save_time(directory)
        return StepCheckpoint(step, manifest, changed_at=changed_at, mark=mark, has_lost_record=has_lost_record)

    def committed(self) -> list[StepCheckpoint]:
        """Return the checkpoints that can be loaded, in ascending order of steps."""
        return [found for found in self.inspect_steps()[0].values() if found.is_loadable]

    def __str__(self) -> str:
        return str(self.place)


def _check_files(directory: Path, manifest: Manifest) -> None:
    """Raise unless every file that the checkpoint names exists with the size that it states."""
    expected = list_recorded_files(directory, manifest)
    faults = [fault for name, size in expected.items() if (fault := _file_fault(directory, name, size))]
    if faults:
        total = format_many(len(expected), "file")
        raise CorruptCheckpointError(f"{directory}: of {total}: {listed(faults, '; ', limit=6)}")


def _check_indexed_files(directory: Path, manifest: Manifest, strategy: LoadStrategy) -> bool:
    """Raise unless every file that the index names exists and is long enough for its items.

    Return whether a record of ours is lost, which is no fault: the files that the index names can be loaded without it.
    """
    try:
        with CheckpointReader(directory, manifest, verify=False) as reader:
            bad = {file.name: file.fault for file in find_incomplete_files(strategy, reader)}
    except UnsafePickleError:  # no damage, which would be skipped: who loads it gets this error
        return False
    has_lost_record = bad.pop(RECORD_NAME, None) is not None
    if bad:
        faults = [f"{name} {fault}" for name, fault in bad.items()]
        raise CorruptCheckpointError(f"{directory}: {listed(faults, '; ', limit=6)}")
    return has_lost_record


def _file_fault(directory: Path, name: str, size: int | None) -> str:
    try:
        found = file_size(directory / name)
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"
    return f"{name} has {found} bytes, {size} were written" if size not in (None, found) else ""


def _without_frames(error: _E) -> _E:
    # An error that is kept must not keep tracebacks, its own or its causes': their frames hold file contents.
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)

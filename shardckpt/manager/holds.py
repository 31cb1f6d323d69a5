"""Holds: what keeps a step from being removed by a retention policy, whichever process has one.

A lease is a reader's, and ends with it. A pin has a label, and lasts until it is taken away. Each is a small JSON file
in the hidden directory ``.shardckpt-holds`` beside the steps, on a store an object there: a checkpoint itself is never
written into. A removal, too, writes a mark there before it looks for holds, as a reader writes its lease before it
looks for such marks. So of a lease and a removal at the same time at least one sees the other, and the removal gives
way.

Leases end at a time of day: the clocks of hosts that share a folder must agree to about a minute.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardckpt.commit import Owner, claim_name, is_claimed, release_name
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manager.small_files import put_small_file, remove_temporaries
from shardckpt.manager.step_resolution import check_step, find_newest
from shardckpt.manager.steps import StepFolder
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage import attempt, on_store, read_file, wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Generator
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

logger = logging.getLogger(__name__)

_DIRECTORY = ".shardckpt-holds"
_NAME = re.compile(r"(?P<directory>.+)\.(?P<kind>lease|pin|removal)\.[0-9a-f]{32}\.json")
_LARGEST = 64 << 10  # bytes of a file; ours have some 200
#: Seconds after which the mark of a removal counts for nothing: its process was stopped, or is on a host that is gone.
_REMOVAL_SECONDS = 600.0
#: Seconds that a lease waits for a removal under way, which takes one rename or the deletion of one object.
_PATIENCE = 10.0
_SHORTEST_LEASE = 3.0


#: What a file of the directory is about; the name of the file says it, too.
Kind = Literal["lease", "pin", "removal"]


class Hold(BaseModel):
    """What a file of the directory says.

    Attributes:
        directory: The name of the step's directory.
        kind: ``lease``, ``pin``, or ``removal``, which is no hold but the mark of a removal.
        holder: Who holds it, for people: a label, or a host and a process id.
        until: When it ends, in seconds since 1970; None for a pin.
        owner: The process that made it, as :attr:`shardckpt.commit.Owner.text` has it; ``""`` for a pin.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    directory: str
    kind: Kind
    holder: str
    until: float | None = None
    owner: str = Field(default="", pattern=r"([0-9a-f]{32})?")

    def __str__(self) -> str:
        if self.kind == "pin":
            return f"pinned as {self.holder!r}"
        if self.kind == "removal":
            return f"being removed by {self.holder}"
        if self.until is None:
            return f"held by {self.holder}"
        ends = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.until))
        return f"leased by {self.holder} until {ends}"

    @property
    def is_current(self) -> bool:
        """Whether it counts: it has not ended, and its process is not known to be dead."""
        if self.until is not None and self.until < time.time():
            return False
        return not self.owner or Owner.from_text(self.owner).is_alive() is not False


class Holds:
    """The holds of a folder's steps. No method is collective.

    Args:
        folder: The folder of the steps.
    """

    def __init__(self, folder: StepFolder) -> None:
        self._folder = folder

    def find(self) -> dict[str, list[Hold]]:
        """Return the leases and pins that count, by the name of the step's directory.

        Raises:
            StorageError: the directory of the holds cannot be read.
        """
        found: dict[str, list[Hold]] = {}
        for hold in self._read_all().values():
            if hold.kind != "removal" and hold.is_current:
                found.setdefault(hold.directory, []).append(hold)
        return found

    def find_removals(self) -> set[str]:
        """Return the names of the steps' directories that are being removed."""
        return {hold.directory for name, hold in self._read_all().items() if _is_under_way(name, hold)}

    def is_being_removed(self, directory: str) -> bool:
        """Return whether a removal of the step's directory is under way."""
        return any(_is_under_way(name, hold) for name, hold in self._read_all([directory]).items())

    @contextlib.contextmanager
    def removing(self, directory: str, needed: Collection[str] = ()) -> Generator[list[Hold], None, None]:
        """Mark a removal, which begins in the block, and yield what stands against it: with any it must not begin.

        Args:
            directory: The name of the step's directory.
            needed: The directories for whose sake it can go.

        Returns:
            A context manager that gives the leases and pins of the directory, and the marks that other removals have
            written of it, or of the needed ones.

        Raises:
            StorageError: the mark cannot be written, or holds cannot be read.
        """
        name, mark = _make(directory, "removal", _describe_process(), _REMOVAL_SECONDS)
        claim_name(name)
        try:
            self.put(name, mark)
            found = self._read_all([directory, *needed])
            found.pop(name, None)
            yield [
                hold
                for other, hold in found.items()
                if _is_under_way(other, hold)
                or (hold.kind != "removal" and hold.directory == directory and hold.is_current)
            ]
        finally:
            release_name(name)
            self.drop(name)

    def put(self, name: str, hold: Hold) -> None:
        """Write a file of the directory, in one step; replace that of the same name.

        Raises:
            StorageError: it cannot be written.
        """
        put_small_file(self._folder.find(_DIRECTORY), name, hold.model_dump_json().encode())

    def drop(self, name: str) -> None:
        """Remove a file of the directory, and the directory once it is empty; no error if that is done already."""
        place = self._folder.find(_DIRECTORY)
        if (remote := on_store(place / name)) is not None:
            remote.delete()
            return
        with wrap_os_errors("end a hold in", place):
            (place / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty, or gone
                place.rmdir()

    def drop_ended(self) -> None:
        """Remove the files of leases and removals that have ended, and what is left of writes that were killed."""
        for name, hold in self._read_all().items():
            if _is_under_way(name, hold) or (hold.kind != "removal" and hold.is_current):
                continue
            try:
                self.drop(name)
            except StorageError as exc:  # it counts for nothing, and the next call drops it
                logger.warning("%s", exc)
        place = self._folder.find(_DIRECTORY)
        if on_store(place) is None and place.is_dir():
            with wrap_os_errors("clean", place):
                remove_temporaries(place)

    def _read_all(self, directories: Collection[str] | None = None) -> dict[str, Hold]:
        """Return what each file says, by name; of some directories of steps, if given."""
        place = self._folder.find(_DIRECTORY)
        with wrap_os_errors("list the holds in", place):
            if (remote := on_store(place)) is not None:
                names = [*attempt("list", remote, remote.folder.files)]
            else:
                names = [path.name for path in place.iterdir()] if place.is_dir() else []
        found = {}
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None or (directories is not None and match["directory"] not in directories):
                continue
            if (hold := self._read(place / name, match)) is not None:
                found[name] = hold
        return found

    def _read(self, path: Path, match: re.Match[str]) -> Hold | None:
        fault = "an unreadable file"
        try:
            hold = Hold.model_validate_json(read_file(path, _LARGEST))
            # Removals look for the files of a step by their names: what counts there must count everywhere.
            if (hold.directory, hold.kind) == (match["directory"], match["kind"]):
                return hold
            fault = f"a file that says {hold.kind} of {hold.directory!r}, unlike its name"
        except FileNotFoundError:
            return None  # it ended meanwhile
        except StorageError as exc:
            # a store that does not answer must not pass for one without a lease
            if isinstance(exc.__cause__, FileNotFoundError):
                return None
            raise
        except (ValidationError, CheckpointingException):
            pass
        # It says that something held the step, and not until when: a step that is kept too long is no loss.
        holder = f"{fault}, {path}: remove it if nothing holds the step"
        return Hold(directory=match["directory"], kind="lease", holder=holder)


class Lease:
    """Keeps a step from being removed while it is read, by any process's retention; see :func:`lease_step`.

    A thread renews it. It ends with the block, and by itself some time after its process or host has died.

    Attributes:
        step: The step.
        path: The checkpoint's path or URL, for ``load`` or ``open_checkpoint``.
    """

    def __init__(self, folder: StepFolder, step: int, holder: str, seconds: float) -> None:
        self.step = step
        self.path = folder.location(step)
        self._folder, self._holds, self._seconds = folder, Holds(folder), seconds
        self._name, self._hold = _make(folder.names.name(step), "lease", holder, seconds)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="shardckpt-lease", daemon=True)
        self._holds.put(self._name, self._hold)
        try:
            self._check_kept()
        except BaseException:
            self._holds.drop(self._name)
            raise
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether it still holds: it was not closed, and could be renewed in time."""
        return not self._closed.is_set() and self._hold.is_current

    def close(self) -> None:
        """End the lease. May be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._holds.drop(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_kept(self) -> None:
        """Wait for a removal that began before the lease was written, and raise if the step is gone after it."""
        deadline = time.monotonic() + _PATIENCE
        while self._holds.is_being_removed(self._hold.directory):
            if time.monotonic() > deadline:
                raise CheckpointingException(
                    f"{self._folder}: step {self.step} is being removed by another process: lease another step, or try "
                    "again"
                )
            time.sleep(0.02)
        check_step(self._folder, self.step)

    def _renew(self) -> None:
        while not self._closed.wait(self._seconds / 3):
            renewed = self._hold.model_copy(update={"until": time.time() + self._seconds})
            try:
                self._holds.put(self._name, renewed)
            except Exception:  # the next turn tries again, and `is_held` says whether that was in time
                logger.warning("cannot renew the lease of step %d in %s", self.step, self._folder, exc_info=True)
            else:
                self._hold = renewed


def lease_step(folder: str | os.PathLike[str], step: int = -1, *, holder: str = "", seconds: float = 600.0) -> Lease:
    """Keep a step from being removed while this process reads it. Not collective: one process calls for all that read.

    Example::

        with lease_step("checkpoints") as lease, open_checkpoint(lease.path) as checkpoint:
            evaluate(checkpoint)

    Args:
        folder: The directory or URL of the steps.
        step: The step; -1 for the newest that can be loaded.
        holder: Who holds it, for people: named where the step is not removed. By default the host and process id.
        seconds: How long the lease outlives this process at most; a living one renews it in time. On the same host a
            dead process's lease ends at once.

    Returns:
        The lease: a context manager.

    Raises:
        CannotLoadError: there is no such step, or it cannot be loaded.
        StorageError: the folder cannot be written to: a lease is a file in it.
    """
    if seconds < _SHORTEST_LEASE:
        raise CheckpointingException(
            f"seconds={seconds}: a lease that ends so soon may not be renewed in time; give {_SHORTEST_LEASE} or more"
        )
    steps = StepFolder(folder, get_plugin_manager())
    if step < 0:
        newest = find_newest(steps)
        if newest is None:
            raise CheckpointingException(f"{steps} has no checkpoint to lease")
        step = newest
    return Lease(steps, step, holder or _describe_process(), seconds)


def find_holds(folder: str | os.PathLike[str]) -> dict[str, list[Hold]]:
    """Return the leases and pins of a folder that count now. Not collective.

    Args:
        folder: The directory or URL of the steps, however they are named.

    Returns:
        Holds by the name of the step's directory.

    Raises:
        StorageError: the folder cannot be read.
    """
    return Holds(StepFolder(folder, get_plugin_manager())).find()


def pin_step(folder: str | os.PathLike[str], step: int, label: str) -> None:
    """Keep a step, whatever the retention policies of any process say, until :func:`unpin_step`. Not collective.

    Args:
        folder: The directory or URL of the steps.
        step: The step.
        label: Why it is kept, for people: ``"release 1.2"``. A step may have several; one label may be on several.

    Raises:
        CannotLoadError: there is no such step, or it cannot be loaded.
        CheckpointingException: the label is empty, or the step is being removed.
        StorageError: the folder cannot be written to.
    """
    if not label.strip():
        raise CheckpointingException(f"step {step}: a pin needs a label that says why the step is kept")
    steps = StepFolder(folder, get_plugin_manager())
    # a lease first: it looks for a removal under way, and waits for it
    with Lease(steps, step, f"the pin {label!r}", _REMOVAL_SECONDS):
        Holds(steps).put(*_make(steps.names.name(step), "pin", label, None))


def unpin_step(folder: str | os.PathLike[str], step: int, label: str) -> None:
    """Take a pin away; no error if the step does not have it. Not collective.

    Args:
        folder: The directory or URL of the steps.
        step: The step, which need not exist.
        label: The pin's.

    Raises:
        StorageError: the folder cannot be written to.
    """
    steps = StepFolder(folder, get_plugin_manager())
    Holds(steps).drop(_make(steps.names.name(step), "pin", label, None)[0])


def _make(
    directory: str, kind: Literal["lease", "pin", "removal"], holder: str, seconds: float | None
) -> tuple[str, Hold]:
    """Return a file's name and what it says."""
    if seconds is None:  # a pin: the same label is the same file
        return f"{directory}.{kind}.{hashlib.sha256(holder.encode()).hexdigest()[:32]}.json", Hold(
            directory=directory, kind=kind, holder=holder
        )
    hold = Hold(directory=directory, kind=kind, holder=holder, until=time.time() + seconds, owner=Owner.current().text)
    return f"{directory}.{kind}.{uuid.uuid4().hex}.json", hold


def _is_under_way(name: str, hold: Hold) -> bool:
    """Return whether a file is the mark of a removal that has not ended."""
    # one of this process that it does not claim is of a removal whose mark could not be deleted
    is_left = hold.owner == Owner.current().text and not is_claimed(name)
    return hold.kind == "removal" and hold.is_current and not is_left


def _describe_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


__all__ = ["Hold", "Holds", "Lease", "find_holds", "lease_step", "pin_step", "unpin_step"]

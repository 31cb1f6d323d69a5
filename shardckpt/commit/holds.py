"""Holds: leases and pins, which keep a checkpoint in a folder from being removed or replaced by any process.

A lease is a reader's, and ends with it. A pin has a label, and lasts until it is taken away. Each is a small JSON file
in the hidden directory ``.shardckpt-holds`` next to the checkpoints, on a store an object there: a checkpoint itself is
never written into. A removal, too, writes a mark there before it looks for holds, as a reader writes its lease before
it looks for such marks; and so does a save that takes the place of a checkpoint. So of a lease and a removal at the
same time at least one sees the other, and the removal gives way. On a full file system, where no lease can be written,
a removal does without its mark.

Leases end at a time of day: the clocks of hosts that share a folder must agree to about a minute.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import time
import uuid
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from shardckpt.commit.owner import Owner, claim_name, is_claimed, release_name
from shardckpt.commit.small_files import SmallFile, SmallFiles, Time
from shardckpt.commit.staging_names import HOLDS_NAME
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    NotEnoughSpaceError,
    StorageError,
    escape_text,
    listed,
)
from shardckpt.storage.abilities import on_store
from shardckpt.storage.remote import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.storage.remote import RemoteFolder

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<directory>.+)\.(?P<kind>lease|pin|removal|save|job)\.[0-9a-f]{32}\.json")
#: Seconds after which the mark of a removal counts for nothing: its process was stopped, or is on a host that is gone.
MARK_SECONDS = 600.0
#: Seconds that a save waits for a removal under way, which takes one rename or the deletion of one object.
_PATIENCE = 60.0


#: Kinds of files in the directory; a file's name says its kind, too.
Kind = Literal["lease", "pin", "removal", "save", "job"]


class Hold(SmallFile):
    """The content of a file of the directory.

    Attributes:
        directory: The name of the step's directory.
        kind: ``lease`` or ``pin``; ``removal`` or ``save``, which are no holds but marks: of a removal, and of a save
            that takes the place of the checkpoint; or ``job``, which says who saves to the folder, and holds nothing.
        holder: Who holds it, for people: a label, or a host and a process id.
        until: When it ends, in seconds since 1970; None for a pin.
        owner: The process that made it, as :attr:`shardckpt.commit.Owner.text` has it; ``""`` for a pin.
    """

    directory: str
    kind: Kind
    holder: str
    until: Time | None = None
    owner: str = Field(default="", pattern=r"^(?:[0-9a-f]{32})?$")

    def __str__(self) -> str:
        if self.kind == "pin":
            return f"pinned as {self.holder!r}"
        holder = escape_text(self.holder)
        if self.kind in ("removal", "save"):
            return f"being {'removed' if self.kind == 'removal' else 'replaced'} by {holder}"
        if self.until is None:
            return f"held by {holder}"
        ends = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.until))
        return f"leased by {holder} until {ends}"

    @property
    def is_current(self) -> bool:
        """Whether it counts: it has not ended, and its process is not known to be dead."""
        if self.until is not None and self.until < time.time():
            return False
        return not self.owner or Owner.from_text(self.owner).is_alive() is not False


class Holds:
    """The holds of a folder's checkpoints. No method is collective.

    The place is their directory, :data:`HOLDS_NAME` next to the checkpoints. A method raises StorageError if it cannot
    be read or written.
    """

    def __init__(self, place: Path) -> None:
        self._files = SmallFiles(place)

    def find(self) -> dict[str, list[Hold]]:
        """Return the leases and pins that count, by the name of the step's directory."""
        found: dict[str, list[Hold]] = {}
        # marks, too: one that cannot be read counts as a lease
        for hold in self._read_all(kinds=("lease", "pin", "removal", "save")).values():
            if hold.kind in ("lease", "pin") and hold.is_current:
                found.setdefault(hold.directory, []).append(hold)
        return found

    def find_jobs(self) -> dict[str, Hold]:
        """Return the jobs that save to the folder, or have done, by the name of their file."""
        found = self._read_all(kinds=["job"]).items()
        return {name: hold for name, hold in found if hold.kind == "job" and hold.owner}

    def find_removals(self) -> set[str]:
        """Return the names of the steps' directories that are being removed."""
        found = self._read_all(kinds=["removal"]).items()
        return {hold.directory for name, hold in found if hold.kind == "removal" and _counts(name, hold)}

    def find_change(self, directory: str) -> Hold | None:
        """Return the mark of a removal of the step's directory, or of a save that takes its place; None without one."""
        found = self._read_all([directory]).items()
        return next((hold for name, hold in found if hold.kind in ("removal", "save") and _counts(name, hold)), None)

    @contextlib.contextmanager
    def removing(self, directory: str, needed: Collection[str] = ()) -> Generator[list[Hold], None, None]:
        """Mark a removal for the block, and yield the holds that forbid it.

        That is each lease and pin of the directory, each mark of another removal or save of it, and each mark of a
        removal of a needed one.
        """
        with self._marking(directory, "removal") as own:
            found = {name: hold for name, hold in self._read_all([directory, *needed]).items() if name != own}
            yield [
                hold
                for name, hold in found.items()
                if _counts(name, hold) and (hold.directory == directory or hold.kind == "removal")
            ]

    @contextlib.contextmanager
    def replacing(self, directory: str) -> Generator[bool, None, None]:
        """Mark a save that takes, in the block, the place of a checkpoint; removals then give way.

        It yields whether it has waited for a removal: then the checkpoint may be gone. A removal that does not end is a
        StorageError, a lease or a pin a CheckpointingException, as of :meth:`refuse`.
        """
        with self._marking(directory, "save") as own:
            deadline, waited = time.monotonic() + _PATIENCE, False
            while True:
                found = self._read_all([directory])
                removal = next((h for name, h in found.items() if h.kind == "removal" and _counts(name, h)), None)
                if removal is None:
                    break
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"{directory} is {removal}, as {self._files} says, and that does not end: save again, or to "
                        "another place"
                    )
                waited = True
                time.sleep(0.02)
            self._refuse(directory, found.values())
            for name, hold in found.items():
                if name != own and not _counts(name, hold):  # of a killed process: no other may look here
                    self._try_to_drop(name)
            yield waited

    def refuse(self, directory: str) -> None:
        """Raise CheckpointingException if a checkpoint is leased or pinned, so that no save may take its place.

        It names the holders.
        """
        self._refuse(directory, self._read_all([directory]).values())

    def _refuse(self, directory: str, found: Collection[Hold]) -> None:
        held = [str(hold) for hold in found if hold.kind in ("lease", "pin") and hold.is_current]
        if held:
            raise CheckpointingException(
                f"{directory} is {listed(held)} ({self._files}), so that nothing takes its place: save to another "
                "folder or step, or end the hold first: a pin by unpin_step or `shardckpt pin FOLDER STEP --label "
                "LABEL --remove`, a lease by closing it, or by the end of its reader"
            )

    @contextlib.contextmanager
    def _marking(self, directory: str, kind: Literal["removal", "save"]) -> Generator[str, None, None]:
        """Write the mark of a change for the block, and yield its name."""
        name, mark = make_hold(directory, kind, describe_process(), MARK_SECONDS)
        claim_name(name)
        try:
            try:
                self.put(name, mark)
            except NotEnoughSpaceError as exc:
                if kind != "removal":
                    raise
                # the removal frees space, and until then there is none for another's lease or save either
                logger.warning("removing %s without a mark of it: %s", directory, exc)
            yield name
        finally:
            release_name(name)
            # A mark that stays counts for nothing in this process, and elsewhere until its time: the work is done.
            self._try_to_drop(name)

    def put(self, name: str, hold: Hold) -> None:
        """Write a file of the directory, in one step; it replaces a file of the same name."""
        self._files.put(name, hold.model_dump_json().encode())

    def drop(self, name: str) -> None:
        """Remove a file of the directory, and the directory once it is empty; no error if that is done already."""
        self._files.drop(name)

    def drop_ended(self) -> None:
        """Remove the files of holds and marks that have ended, and temporary files of killed writes."""
        for name, hold in self._read_all(kinds=("lease", "pin", "removal", "save")).items():
            if not _counts(name, hold):
                self._try_to_drop(name)
        self._files.clear()

    def _try_to_drop(self, name: str) -> None:
        """Remove a file that counts for nothing; an error is a warning, and a later call tries again."""
        try:
            self.drop(name)
        except StorageError as exc:
            logger.warning("%s", exc)

    def _read_all(
        self, directories: Collection[str] | None = None, kinds: Collection[Kind] | None = None
    ) -> dict[str, Hold]:
        """Return the content of each file, by name; of some directories of steps, or some kinds, if given."""
        found, place = {}, self._files.open()
        for name in self._files.names():
            match = _NAME.fullmatch(name)
            if match is None or (directories is not None and match["directory"] not in directories):
                continue
            if kinds is not None and match["kind"] not in kinds:
                continue
            if (hold := self._read(place / name, match)) is not None:
                found[name] = hold
        return found

    def _read(self, path: Path, match: re.Match[str]) -> Hold | None:
        try:
            hold = Hold.read(path)
        except CorruptCheckpointError:
            fault = "an unreadable file"
        else:
            # Removals look for the files of a step by their names: a file that counts there must count everywhere.
            if hold is None or (hold.directory, hold.kind) == (match["directory"], match["kind"]):
                return hold  # None: it ended meanwhile
            fault = f"a file that says {hold.kind} of {hold.directory!r}, unlike its name"
        # It says that something held the step, and not until when: a step that is kept too long is no loss.
        holder = f"{fault}, {path}: remove it if nothing holds the step"
        return Hold(directory=match["directory"], kind="lease", holder=holder)


def make_hold(directory: str, kind: Kind, holder: str, seconds: float | None) -> tuple[str, Hold]:
    """Return a file's name and content; without ``seconds`` of a pin, which does not end."""
    if seconds is None:  # a pin: the same label is the same file
        return f"{directory}.{kind}.{hashlib.sha256(holder.encode()).hexdigest()[:32]}.json", Hold(
            directory=directory, kind=kind, holder=holder
        )
    hold = Hold(directory=directory, kind=kind, holder=holder, until=time.time() + seconds, owner=Owner.current().text)
    return f"{directory}.{kind}.{uuid.uuid4().hex}.json", hold


def hold_place(target: Path, open_folder: Callable[[str], RemoteFolder] | None = None) -> AbstractContextManager[bool]:
    """Let a save take the place of a checkpoint in the block: see :meth:`Holds.replacing`."""
    holds = find_holds_beside(target, open_folder)
    return contextlib.nullcontext(False) if holds is None else holds.replacing(target.name)


def find_holds_beside(target: Path, open_folder: Callable[[str], RemoteFolder] | None = None) -> Holds | None:
    """Return the holds of the folder that a checkpoint is in; None if nothing can hold the checkpoint."""
    if not target.name[-1:].isdecimal():  # only steps are held, and their names end with the number
        return None
    remote = on_store(target)
    if remote is None:
        return Holds(target.parent / HOLDS_NAME)
    parent = remote.url.rpartition("/")[0]
    if open_folder is None or "://" not in parent:
        return None
    return Holds(RemotePath(open_folder(f"{parent}/{HOLDS_NAME}")))


def _counts(name: str, hold: Hold) -> bool:
    """Return whether a file counts: it has not ended, and is no mark that this process failed to delete."""
    is_mark = hold.kind in ("removal", "save")
    is_left = is_mark and hold.owner == Owner.current().text and not is_claimed(name)
    return hold.is_current and not is_left


def describe_process() -> str:
    """Return this process, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"

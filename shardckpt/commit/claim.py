"""A save's claim of a folder on a store, and its in-progress object: they say who saves there, and since when.

The claim is an object that only one save can create where the store has conditional writes. The in-progress object has
the save's id in its name: by a listing a save finds out whether another has taken its place.
"""

from __future__ import annotations

import calendar
import logging
import os
import re
import socket
import time
from typing import TYPE_CHECKING

from shardckpt.commit.owner import Owner
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manifest.models import Marker, Record
from shardckpt.manifest.names import (
    MARKER_LIMIT,
    MARKER_NAME,
    RECORD_LIMIT,
    RECORD_NAME,
    SAVE_ID,
    find_generation,
    list_parents,
)
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.input_file import read_file
from shardckpt.storage.places import get_bucket
from shardckpt.storage.store_abilities import CreatesObjects

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardckpt.storage.remote import RemotePath

logger = logging.getLogger(__name__)

_UNDER_WAY = ".shardckpt-uploading-"
#: The in-progress object of a removal (:mod:`shardckpt.commit.removal`). It has the prefix of a save's: once the
#: marker is deleted, a later save may take the folder as one of a save that never ended.
REMOVAL_IN_PROGRESS = f"{_UNDER_WAY}removal"
#: The object that only one save at a time can create: it says who saves.
CLAIM = f"{_UNDER_WAY}claim"
#: More bytes than the claim or the in-progress object of a save has.
INTRODUCTION_BYTES = 300
#: Stands before the process in them.
_OWNER = b"\nowner "
_INTRODUCTION = re.compile(rb"begun ([-0-9]+ [:0-9]+) UTC" + _OWNER + rb"([0-9a-f]{32})\n")
_TIME = "%Y-%m-%d %H:%M:%S"
#: Clients and buckets that have refused a write whose condition did not hold: they are not asked once more.
_honours_conditions: set[tuple[type, str]] = set()


class Claim:
    """The claim and the in-progress object of one save in a folder; only the main rank makes them.

    ``overruled`` are in-progress objects of other saves that have died, or are taken for dead.
    """

    def __init__(self, target: RemotePath, save_id: str, overruled: Collection[str] = frozenset()) -> None:
        self._target = target
        self._overruled = frozenset(overruled)
        self.in_progress = in_progress_name(save_id)
        self._save_id = save_id
        self._text = b""
        #: The store's tag of the in-progress object of a dead process.
        self._tag: object = None

    def take(self) -> None:
        """Create the claim, where the store has conditional writes; StorageError names another save that has it."""
        folder = self._target.folder
        if not isinstance(folder, CreatesObjects):
            return
        text, path = _introduce(self._save_id), self._target / CLAIM
        if not self._create(text):
            other = self.describe_other([CLAIM])
            raise StorageError(
                f"{self._target}: another save has begun there at the same time{other}; it goes on, and this one has "
                "written nothing: give another URL, or wait for the other"
            )
        self._text = text
        # the answer may be a lie: some servers ignore the condition. There the in-progress objects decide: of two saves
        # that see each other's, none commits
        store = type(folder), get_bucket(folder.url)
        if store in _honours_conditions:
            return
        if not path.create(text):
            _honours_conditions.add(store)
        else:
            logger.warning(
                "the store of %s ignores conditions of writes: of two saves that begin there at once, both will fail",
                self._target,
            )

    def _create(self, text: bytes) -> bool:
        """Return whether the claim is this save's, created now or by an attempt whose answer was lost."""
        for _ in range(2):  # the save that has the claim may end between the two requests
            if (self._target / CLAIM).create(text):
                return True
            if found := self._read():
                return found == text
        return False

    def announce(self) -> None:
        """Write the in-progress object: from now on other saves see this one by a listing."""
        (self._target / self.in_progress).write(_introduce(self._save_id))

    def can_take_over(self) -> bool:
        """Whether the process that has written the in-progress object has certainly ended; :meth:`take_over` follows.

        Only where the store replaces an object on a condition: else two processes could go on with the same.
        """
        text, self._tag = (self._target / self.in_progress).read_tagged()
        found = parse_introduction(text)
        return self._tag is not None and found is not None and found[0].is_alive() is False

    def take_over(self) -> None:
        """Make the in-progress object of a dead process this one's, unless another process was first."""
        path, text = self._target / self.in_progress, _introduce(self._save_id)
        # the second: an attempt of ours had replaced it, and its answer was lost
        if not path.replace_tagged(text, self._tag) and path.read_tagged()[0] != text:
            raise self.make_error([self.in_progress])

    def is_anothers(self, found: Collection[str]) -> bool:
        """Whether another save has begun in the folder since, judged by a listing."""
        known = {self.in_progress, CLAIM, *self._overruled}
        return any(is_mark(name) and name not in known for name in found)

    def list_own(self, found: Collection[str]) -> list[str]:
        """Return this claim's own objects in a listing, the in-progress object last."""
        own = [CLAIM] if self._text and CLAIM in found and self._read() == self._text else []
        return [*own, self.in_progress]

    @property
    def names(self) -> list[str]:
        """The names of its objects, as long as no other save has taken the folder; the in-progress object last."""
        return [*([CLAIM] if self._text else []), self.in_progress]

    def describe_other(self, found: Collection[str]) -> str:
        """Say which other save has these objects, as far as they tell; ``""`` if they do not."""
        try:
            if CLAIM in found and (claim := self._read()) not in (b"", self._text):
                return describe_introduction(claim)
            known = {self.in_progress, CLAIM, REMOVAL_IN_PROGRESS, *self._overruled}
            for name in filter(is_mark, found):
                if name not in known:
                    return describe_introduction((self._target / name).read_range(0, INTRODUCTION_BYTES))
            if MARKER_NAME in found:
                return f" (save {read_save_id(self._target)})"
        except (CheckpointingException, OSError, ValueError) as exc:
            logger.info("cannot say which save has %s: %s", self._target, exc)
        return ""

    def make_error(self, found: Collection[str]) -> StorageError:
        """Return the error of a save whose folder another has taken."""
        return make_taken_error(self._target, self.describe_other(found))

    def _read(self) -> bytes:
        """Return the text of the claim in the folder; empty if there is none any more."""
        try:
            return (self._target / CLAIM).read_range(0, INTRODUCTION_BYTES)
        except StorageError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return b""
            raise


def in_progress_name(save_id: str) -> str:
    """Return the name of the in-progress object of a save."""
    return f"{_UNDER_WAY}{save_id}"


def parse_in_progress(name: str) -> str:
    """Return the id of the save that has an in-progress object; ``""`` for any other name."""
    save_id = name.removeprefix(_UNDER_WAY)
    return save_id if name == in_progress_name(save_id) and re.fullmatch(SAVE_ID, save_id) else ""


def is_mark(name: str) -> bool:
    """Return whether an object is a claim, or the in-progress object of a save or removal."""
    return name.startswith(_UNDER_WAY)


def list_marks(directory: Path) -> list[str]:
    """Return the names of the claims and in-progress objects in a folder on a store; none of a local directory."""
    return [] if has_local_files(directory) else [path.name for path in directory.iterdir() if is_mark(path.name)]


def describe_introduction(text: bytes) -> str:
    """Describe a claim or in-progress object, for an error."""
    return f" ({text.partition(_OWNER)[0].decode(errors='replace')!r})"


def parse_introduction(text: bytes) -> tuple[Owner, float] | None:
    """Return the process of a save, and when it began in seconds since 1970, as its in-progress object or claim says.

    None for another text, such as a removal's, or one with a time that no calendar has.
    """
    found = _INTRODUCTION.search(text)
    if found is None:
        return None
    try:
        begun = time.strptime(found[1].decode(), _TIME)
    except ValueError:
        return None
    return Owner.from_text(found[2].decode()), float(calendar.timegm(begun))


def without_others(found: Collection[str]) -> set[str]:
    """Return the objects at a URL without the objects of other checkpoints and saves in folders below."""
    marks = (name.rpartition("/") for name in found if not find_generation(name))
    others = {folder for folder, _, name in marks if folder and (name == MARKER_NAME or is_mark(name))}
    return {name for name in found if others.isdisjoint(list_parents(name))}


def read_save_id(target: RemotePath) -> str:
    """Return the id of the save that is at a URL now."""
    target = target.refresh()
    generation = Marker.parse(read_file(target / MARKER_NAME, MARKER_LIMIT)).shardckpt_generation
    if generation:
        return generation.rpartition("-")[2]
    return Record.parse(read_file(target / RECORD_NAME, RECORD_LIMIT)).save_id


def make_taken_error(target: RemotePath, other: str = "") -> StorageError:
    """Return the error of a save whose folder another has taken; ``other`` says which."""
    return StorageError(f"{target}: another save has begun there{other}, or the objects of this one were deleted")


def _introduce(save_id: str) -> bytes:
    """Return the content of the claim and the in-progress object of a save that begins now: its owner and time."""
    now = time.strftime(_TIME, time.gmtime())
    who = f"save {save_id} of process {os.getpid()} on {socket.gethostname()}, begun {now} UTC"
    return who.encode() + _OWNER + f"{Owner.current().text}\n".encode()

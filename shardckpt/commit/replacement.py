"""Overwrite a checkpoint on an object store: a new generation next to the old, the marker switched last.

A store cannot exchange two folders, but it replaces one object in one step. So the new save is a whole checkpoint in a
folder of its own below the URL, its generation, and the marker at the URL is replaced by one that names this folder:

1. The main rank claims the URL as a first save does, and looks once more: no other save has begun, and the marker is
   still the one that was found.
2. All ranks save to the generation (:mod:`shardckpt.commit.upload`), whose marker comes last. The old checkpoint's
   objects are not touched.
3. The main rank lists the URL: no other save has begun, and every object of the generation is still there. It replaces
   the URL's marker, where the store can on condition that it is the one that was found. Before this a load sees the old
   checkpoint, after it the new.
4. The main rank deletes the old checkpoint's objects, then the claims, then the in-progress object: after a crash the
   in-progress object shows that something is left.

A save deletes the checkpoint that it has replaced, and leftovers of other saves if all of them are certainly dead.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardckpt.commit.claim import (
    CLAIM,
    INTRODUCTION_BYTES,
    REMOVAL_IN_PROGRESS,
    Claim,
    describe_introduction,
    is_mark,
    parse_introduction,
)
from shardckpt.commit.generations import delete_generations, delete_record_last, list_first_save
from shardckpt.commit.owner import Owner
from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.manifest.models import Marker
from shardckpt.manifest.names import MARKER_NAME, RECORD_NAME, find_generation, generation_name
from shardckpt.storage.remote import list_objects

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.storage.remote import RemotePath

#: Seconds. A claim without an in-progress object that is older is of a process that died between the two.
_CLAIM_SECONDS = 60.0


class Replacement:
    """The overwrite of a complete checkpoint at a URL; only the main rank has one."""

    def __init__(self, target: RemotePath, save_id: str) -> None:
        self._target = target
        self._save_id = save_id
        self._marker = self._target / MARKER_NAME
        self._claim = Claim(self._target, save_id)
        #: Of the marker that was found: its bytes, the store's tag, and the generation that it names.
        self._old = b""
        self._tag: object = None
        self._old_generation = ""
        #: Names of the objects of the first save at the URL, if they are still there.
        self._first: set[str] = set()
        #: The in-progress objects of saves whose processes are dead, and the generations that they have left.
        self._dead: set[str] = set()
        self._needless: set[str] = set()
        self._begun = False
        #: Whether the marker may have been replaced, by a request whose answer was lost.
        self.may_be_switched = False

    def begin(self, found: Collection[str]) -> None:
        """Claim the URL; ``found`` are all objects there, among them the objects of a dead process's save.

        It is a StorageError if another save is under way there, or nothing says which objects are the checkpoint's.
        """
        self._old, self._tag = self._marker.read_tagged()
        self._old_generation = self._parse_marker(self._old).shardckpt_generation or ""
        self._first = list_first_save(self._target, found)
        if not self._old_generation and not self._first:
            raise StorageError(
                f"{self._target} has a checkpoint of another library, or one whose {RECORD_NAME} is damaged: nothing "
                "says which objects an overwrite would have to remove; give another URL, or delete the objects there "
                "first"
            )
        marks = {name for name in found if is_mark(name)} - {self._claim.in_progress}
        overruled = self._overrule(marks)
        if overruled == self._dead:
            # a dead save may also have left the checkpoint that it replaced; if the save may live, nothing is deleted
            self._needless = {folder for name in found if (folder := find_generation(name))}
            self._needless -= {self._old_generation, generation_name(self._save_id)}
        else:
            self._dead.clear()  # left to a prune
        self._claim = Claim(self._target, self._save_id, overruled)
        if CLAIM in marks:
            (self._target / CLAIM).delete()
        self._claim.take()
        self._begun = True
        self._claim.announce()
        # the listing may be older than an overwrite that began and ended since
        found = set(list_objects(self._target.folder))
        if self._claim.is_anothers(found) or MARKER_NAME not in found or self._marker.read_tagged()[0] != self._old:
            raise self._claim.make_error(found)

    def switch(self, marker: bytes, expected: Mapping[str, int]) -> None:
        """Replace the URL's marker by one that names the generation, if that has every expected object with its bytes.

        If another save has replaced the checkpoint, it is a StorageError.
        """
        generation = generation_name(self._save_id)
        new = self._parse_marker(marker).model_copy(update={"shardckpt_generation": generation}).dump()
        found = list_objects(self._target.folder)
        is_ours = self._claim.in_progress in found and not self._claim.is_anothers(found)
        if not is_ours or MARKER_NAME not in found or self._marker.read_tagged()[0] != self._old:
            raise self._claim.make_error(found)
        bad = [name for name, size in expected.items() if found.get(f"{generation}/{name}") != size]
        if bad:
            raise StorageError(f"{self._target / generation / bad[0]}: it is gone, or its size has changed")
        self.may_be_switched = True
        # if it is the new one, an attempt of ours had replaced it, and its answer was lost
        if not self._marker.replace_tagged(new, self._tag) and self._marker.read_tagged()[0] != new:
            self.may_be_switched = False
            raise self._claim.make_error(set(found) - {CLAIM})

    def finish(self, generation_marks: Collection[str]) -> None:
        """Delete the old checkpoint, leftovers of dead saves, and at last the claims and in-progress objects.

        ``generation_marks`` are the names of the new save's own ones in its generation.
        """
        generation = generation_name(self._save_id)
        found = set(list_objects(self._target.folder))
        delete_generations(self._target, found, (self._needless | {self._old_generation}) - {""})
        delete_record_last(self._target, self._first)
        self._target.delete_all([f"{generation}/{name}" for name in generation_marks])
        self._target.delete_all(self._dead)
        for name in self._claim.names:
            (self._target / name).delete()

    def abort(self) -> None:
        """Give the URL back, unless the marker may have been replaced: then a prune finds the leftovers."""
        if self._begun and not self.may_be_switched:
            # its objects are deleted; its folder outlives them on some stores
            delete_generations(self._target, (), [generation_name(self._save_id)])
            self._target.delete_all(self._claim.list_own(set(list_objects(self._target.folder))))

    def _overrule(self, marks: set[str]) -> set[str]:
        """Return the in-progress objects of other saves, which have died as far as is known.

        A StorageError names one that is of another process of this host that lives, or that is only beginning.
        """
        for name in sorted(marks - {REMOVAL_IN_PROGRESS}):
            try:
                text = (self._target / name).read_range(0, INTRODUCTION_BYTES)
            except StorageError as exc:
                if isinstance(exc.__cause__, FileNotFoundError):  # it has ended meanwhile
                    continue
                raise
            owner, begun = parse_introduction(text) or (None, 0.0)
            alive = None if owner is None else owner.is_alive()
            is_new = name == CLAIM and len(marks) == 1 and abs(time.time() - begun) < _CLAIM_SECONDS
            if (alive and owner != Owner.current()) or (alive is None and is_new):
                raise StorageError(
                    f"{self._target}: another save is under way there{describe_introduction(text)}: wait for it, or "
                    "give another URL"
                )
            if alive is False and name != CLAIM:
                self._dead.add(name)
        return marks - {CLAIM}

    def _parse_marker(self, data: bytes) -> Marker:
        try:
            return Marker.parse(data)
        except ValueError as exc:
            raise CorruptCheckpointError(f"{self._marker} is damaged, so that nothing is overwritten: {exc}") from exc

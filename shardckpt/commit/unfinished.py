"""Leftovers of killed saves and removals on a store: found by in-progress objects, removed once their owner is dead.

A killed save leaves objects without a marker, and its in-progress object, which names its process. Whether that process
is alive is certain on its host; elsewhere the time of the last write decides, as for leftovers in directories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt import settings
from shardckpt.commit.claim import (
    INTRODUCTION_BYTES,
    REMOVAL_IN_PROGRESS,
    is_mark,
    parse_introduction,
    without_others,
)
from shardckpt.commit.generations import delete_generations, delete_record_last, list_first_save
from shardckpt.commit.leftovers import ELSEWHERE, explain_recent
from shardckpt.commit.removal import delete_checkpoint
from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.manifest.models import Marker
from shardckpt.manifest.names import MARKER_NAME, find_generation
from shardckpt.storage.abilities import on_store
from shardckpt.storage.journal_log import is_journal
from shardckpt.storage.places import list_names
from shardckpt.storage.remote import attempt, list_objects

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardckpt.commit.owner import Owner
    from shardckpt.storage.remote import RemotePath


class Unfinished(NamedTuple):
    """The objects of saves and removals at a URL that have not ended.

    Attributes:
        objects: Size in bytes of each object that goes with them, by name.
        marks: Names of the claim and the in-progress objects among these.
        owners: The process of each save.
        begun: When the last save began, in seconds since 1970; 0 if nothing says it.
        is_removal: Whether a removal has made the checkpoint invisible, so that it may be continued, whoever began it.
    """

    path: RemotePath
    objects: dict[str, int]
    marks: frozenset[str]
    owners: tuple[Owner, ...]
    begun: float
    is_removal: bool


def find_unfinished(place: Path) -> Unfinished | None:
    """Return the objects of unfinished saves and removals at a URL; None if there are none, or in a directory.

    Next to a complete checkpoint they are the objects that a save deletes after it has written the marker; and of
    overwrites, all generations but the current one. It takes one listing without folders, and more requests only if
    that finds something.
    """
    if (path := on_store(place)) is None:
        return None
    if not any(map(is_mark, list_names(path))):
        return None
    tree = list_objects(path.folder)
    # after the listing of all: a save whose objects are in that has its in-progress object in this
    direct = attempt("list", path, path.folder.files)
    marks = frozenset(filter(is_mark, direct))
    try:
        said = [parse_introduction((path / name).read_range(0, INTRODUCTION_BYTES)) for name in marks]
        generation = _find_generation(path) if MARKER_NAME in direct else ""
    except StorageError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):  # the save has ended meanwhile
            return None
        raise
    if not marks or (MARKER_NAME in direct) != (MARKER_NAME in tree):  # it has ended, or was committed, meanwhile
        return None
    if MARKER_NAME not in direct:
        objects = {name: tree[name] for name in without_others(tree)}
    else:
        objects = {name: tree[name] for name in _list_needless(path, tree, generation)}
    objects |= {name: direct[name] for name in marks}
    known = [each for each in said if each is not None]
    is_removal = marks == {REMOVAL_IN_PROGRESS} and MARKER_NAME not in direct
    owners = tuple({owner for owner, _ in known})
    return Unfinished(path, objects, marks, owners, max((begun for _, begun in known), default=0.0), is_removal)


def _find_generation(path: RemotePath) -> str | None:
    """Return the generation that is the checkpoint; ``""`` if the URL itself has it, None if unknown."""
    try:
        return Marker.parse((path / MARKER_NAME).read_tagged()[0]).shardckpt_generation or ""
    except (ValueError, CorruptCheckpointError):
        return None


def _list_needless(path: RemotePath, tree: Mapping[str, int], generation: str | None) -> set[str]:
    """Return the objects of a complete checkpoint's URL that no load needs: other generations' objects, and marks."""
    if generation is None:
        return set()
    # the journal of a conversion, at the URL or in its generation
    others = {name for name in tree if is_journal(name.removeprefix(f"{generation}/"))}
    others |= {name for name in tree if find_generation(name) not in ("", generation)}
    if not generation:
        return others
    marks = {
        name for name in tree if name.startswith(f"{generation}/") and is_mark(name.removeprefix(f"{generation}/"))
    }
    return others | marks | list_first_save(path, tree)


def explain_unfinished_kept(unfinished: Unfinished, hours: float | None = None) -> str:
    """Return why the leftovers of a save must stay; ``""`` if they may be removed.

    It is judged by its process and the time of its last write. ``hours`` after that a process on another host counts as
    dead; by default ``SHARDCKPT_LEFTOVER_HOURS``.
    """
    alive = [owner.is_alive() for owner in unfinished.owners]
    if unfinished.is_removal or (alive and set(alive) == {False}):
        return ""
    if True in alive:
        return f"process {unfinished.owners[alive.index(True)].pid} of this host is alive"
    limit = settings.leftover_hours() if hours is None else hours
    if limit <= 0:  # clocks of other hosts may be ahead
        return ""
    times = unfinished.path.times()
    written = max([unfinished.begun, *(times[name] for name in unfinished.objects if name in times)])
    if not written:
        return "nothing says who writes it, or when it was written: --older-than 0 removes it"
    return explain_recent(ELSEWHERE if alive else "an unknown process", written, limit)


def remove_unfinished(unfinished: Unfinished) -> None:
    """Remove the leftovers of a save, or continue a removal; several processes may do so at a time.

    Nothing is removed if another save has taken the place since it was found. A save that begins there by
    ``overwrite=True`` during the deletion fails with an error, since some of its objects may go. If the store fails,
    the rest is found again.
    """
    path = unfinished.path
    now = find_unfinished(path)
    if now is None or now.marks != unfinished.marks:
        return
    if unfinished.is_removal and now.is_removal:
        delete_checkpoint(path)
        return
    # the objects that were judged: later ones belong to a living save
    names = now.objects.keys() & unfinished.objects.keys() - now.marks
    delete_record_last(path, names)
    delete_generations(path, (), {find_generation(name) for name in names} - {""})  # folders that are empty now
    path.delete_all(now.marks)  # last: after a crash in between, the rest is still found

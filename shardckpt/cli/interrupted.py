"""Describe the work that a verb had done when Ctrl-C interrupted it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, listed, name_call

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

#: The remains of a verb that does not write all at its end.
_LEFT = {
    "prune": "removed steps and files are gone, and the next call goes on",
    "verify": "verdicts that it has marked stay",
    "demo": "its files are in its folder",
}


def identify_target(options: argparse.Namespace) -> object:
    """Return the identity of a DST on this machine, which a later DST of that name does not share; None without one."""
    if not (target := find_target(options)):
        return None
    from shardckpt.engine.locations import find_local

    with suppress(CheckpointingException, OSError):
        place = find_local(target)
        if place is not None and place.exists():
            found = place.stat()
            return found.st_dev, found.st_ino
    return None


def find_published(options: argparse.Namespace, before: object) -> str:
    """Return DST, if an interrupted verb has given it its name already, so that it is complete; else ``""``.

    ``before`` is the result of :func:`identify_target` before the verb ran.
    """
    return find_target(options) if identify_target(options) not in (None, before) else ""


def describe_left(options: argparse.Namespace) -> str:
    """Describe the files that an interrupted verb leaves.

    One that writes DST removes its files, but a second Ctrl-C stops that, and the files of an earlier call that was
    killed stay until a later call continues with them.
    """
    if options.verb in _LEFT:
        return _LEFT[options.verb]
    target = find_target(options)
    staged = _list_staged(target) if target else []
    if not staged:
        return "nothing was written"
    from shardckpt.storage.journal_log import JOURNAL_NAME

    place = staged[0].parent
    is_resumable = any((path / JOURNAL_NAME).exists() for path in staged)
    advice = "the same call goes on with it, and " * is_resumable + f"{name_call('prune', place)} removes it"
    return f"{target} is unchanged; the unfinished output stays in {listed([each.name for each in staged])}: {advice}"


def find_target(options: argparse.Namespace) -> str:
    """Return the target of a verb; ``""`` for one that writes nothing new."""
    found: str = getattr(options, "target", getattr(options, "new", ""))
    return found


def _list_staged(target: str) -> list[Path]:
    """Return the staging directories of a verb's target on this machine."""
    from shardckpt.commit.commit import list_staging_directories
    from shardckpt.engine.locations import find_local

    with suppress(CheckpointingException, OSError):  # such as of a folder that is not there
        place = find_local(target)
        return [] if place is None else list_staging_directories(place)
    return []

"""Marks: the verdict of a verification about a checkpoint, kept next to it.

A mark is a small JSON file in the hidden directory ``.shardckpt-marks`` next to the steps, on a store an object there:
a checkpoint itself is never written into. It names the save that was checked: of another save, which replaced the
checkpoint under the same name, it says nothing.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError

from shardckpt import __version__
from shardckpt.commit.small_files import SmallFile, SmallFiles, Time
from shardckpt.engine.locations import find_local_text, locate
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    describe_invalid,
    listed,
)
from shardckpt.manager.step_names import MARKS_NAME
from shardckpt.manifest.names import RECORD_NAME
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import hold_checkpoint
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.storage.places import get_url
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shardckpt.manifest.models import Record
    from shardckpt.manifest.plain import PlainRecord

logger = logging.getLogger(__name__)

_SUFFIX = ".json"
#: Faults that a mark lists, and characters of each.
_MOST_FAULTS, _LONGEST_FAULT = 5, 1000
#: Damaged files that a mark lists, and characters of all their names. A longer list is left out: so many files include
#: some with data, which cannot be mended.
_MOST_DAMAGED, _LONGEST_NAMES = 100, 5000

#: The result of a verification.
Verdict = Literal["verified", "failed"]
#: The state of a step's bytes: ``candidate`` if nothing is known of them.
StepState = Literal["candidate", "verified", "failed"]


class NotMarkedError(CheckpointingException):
    """Nothing in a checkpoint tells its save from another one, so that it cannot have a mark."""


class Mark(SmallFile):
    """The verdict about one save of a checkpoint.

    Attributes:
        verdict: ``verified``: every file is as it was written. ``failed``: some are not.
        save_id: The save that was checked.
        root: The SHA-256 that the save's record has of itself, and with it of the digests of all files.
        checked: ``digests`` if all bytes were compared, else ``structure``.
        files: How many were checked.
        faults: What is wrong, the first few.
        damaged: The files that are not as written, all of them; none if there are too many to name.
        time: When the check ended, in seconds since 1970.
        writer: The release that checked, such as ``shardckpt 0.1.0``.
    """

    verdict: Verdict
    save_id: str
    root: str
    checked: Literal["digests", "structure"]
    files: Annotated[int, Field(ge=0, lt=1 << 53)]
    faults: Annotated[tuple[str, ...], Field(strict=False)] = ()  # JSON has lists
    damaged: Annotated[tuple[str, ...], Field(strict=False)] = ()
    time: Time
    writer: str

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d", time.gmtime(self.time))
        why = f": {listed(self.faults, '; ')}" if self.faults else ""
        return f"marked {self.verdict} on {day} by {self.checked}{why}"

    def is_about(self, record: PlainRecord | Record) -> bool:
        """Return whether the checkpoint with this record is the save that was checked."""
        return _identify(record) == (self.save_id, self.root)


def name_mark(name: str) -> str:
    """Return the name of the mark of a checkpoint whose directory has that name."""
    return f"{name}{_SUFFIX}"


def find_mark(place: Path, name: str, record: PlainRecord | Record | None) -> Mark | None:
    """Return the mark of a checkpoint; None if it has none, or that of another save. Not collective.

    ``place`` is the directory of the marks, :data:`MARKS_NAME` next to the checkpoint; ``record`` is None if the
    checkpoint has none. It is an error if the store does not answer: that must not pass for a checkpoint without a
    mark.
    """
    if record is None:
        return None
    path = place / name_mark(name)
    try:
        mark = Mark.read(path)
    except CorruptCheckpointError as exc:
        logger.warning(
            "%s is not a valid mark, and is ignored: verify %s with --mark again: %s",
            path,
            name,
            str(exc).splitlines()[0],
        )
        return None
    return mark if mark is not None and mark.is_about(record) else None


def find_mark_of(checkpoint: Path, record: PlainRecord | Record | None) -> Mark | None:
    """Return the mark of a checkpoint at a path or URL; see :func:`find_mark`."""
    return find_mark(*_find_place(get_url(checkpoint)), record)


def identify_save(checkpoint: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the identity of the save that is at a path now, for :func:`mark_checkpoint`. Not collective.

    Without a record of a save it raises NotMarkedError: a mark could not be told from another save's.
    """
    directory = locate(checkpoint, get_plugin_manager())
    try:
        record = retry_if_replaced(lambda: hold_checkpoint(directory, get_plugin_manager())[1], directory).record
    except (NotACheckpointError, IncompleteCheckpointError):  # a folder of the Hub, or a file, may be read
        record = None
    if record is None:
        raise NotMarkedError(
            f"{directory} cannot be marked: it has no record of a save of ours (another library saved it, or "
            f"{RECORD_NAME} is lost), and so nothing tells this save from another at the same path"
        )
    return _identify(record)


def mark_checkpoint(
    checkpoint: str | os.PathLike[str],
    save: tuple[str, str],
    verdict: Verdict,
    *,
    checked: Literal["digests", "structure"],
    files: int,
    faults: Collection[str] = (),
    damaged: Collection[str] = (),
    dry_run: bool = False,
) -> Mark:
    """Write and return the verdict of a verification about a checkpoint, in place of an earlier one. Not collective.

    ``save`` is what :func:`identify_save` returned before the verification: if another save has replaced the checkpoint
    since, that is an error, and nothing is written. ``faults`` are texts for people; ``damaged`` names the files that
    are not as written.
    """
    check_annotated(mark_checkpoint, locals())
    if identify_save(checkpoint) != save:
        raise CheckpointingException(
            f"{checkpoint} was replaced by another save while it was verified: it is not marked; verify it again"
        )
    names = [*map(_make_text, damaged)]
    is_listed = len(names) <= _MOST_DAMAGED and sum(map(len, names)) <= _LONGEST_NAMES
    try:
        mark = Mark(
            verdict=verdict,
            save_id=save[0],
            root=save[1],
            checked=checked,
            files=operator.index(files),
            faults=tuple(_make_text(fault)[:_LONGEST_FAULT] for fault in [*faults][:_MOST_FAULTS]),
            damaged=tuple(names) if is_listed else (),
            time=time.time(),
            writer=f"shardckpt {__version__}",
        )
    except ValidationError as exc:  # of a verdict that is none, or a negative number
        raise CheckpointingException(f"{checkpoint} is not marked: {describe_invalid(exc)}") from exc
    if not dry_run:
        place, name = _find_place(checkpoint)
        SmallFiles(place).put(name_mark(name), mark.model_dump_json().encode())
    return mark


def drop_marks(place: Path, list_existing: Callable[[], Collection[str]]) -> None:
    """Remove the marks of checkpoints that are gone, and the directory once it is empty. Not collective.

    ``list_existing`` returns the names of the checkpoints that exist; it is asked only if there are marks.
    """
    marks = SmallFiles(place)
    names = [name for name in marks.names() if name.endswith(_SUFFIX)]
    existing = list_existing() if names else ()
    for name in names:
        is_gone = name.removesuffix(_SUFFIX) not in existing
        if is_gone and not (place / name).is_dir():  # a directory is somebody else's
            marks.drop(name)
    marks.clear()


def _make_text(text: str) -> str:
    """Return a text as JSON takes it: in the name of a file, bytes that are no UTF-8 are lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _identify(record: PlainRecord | Record) -> tuple[str, str]:
    return record.save_id, record.self_digest


def _find_place(checkpoint: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return the directory of the marks, and the checkpoint's name in it, as a manager of the folder looks for it."""
    text = os.fspath(checkpoint)
    if (local := find_local_text(text)) is None:
        folder, _, name = text.rstrip("/").rpartition("/")
        return locate(f"{folder}/{MARKS_NAME}", get_plugin_manager()), name
    path = Path(local).absolute()
    resolved = path.resolve()
    # `latest` may be a link to a step of its folder, whose mark it is; a step may be a link to elsewhere
    name = resolved.name if resolved.parent == path.parent.resolve() else path.name
    return path.parent.resolve() / MARKS_NAME, name

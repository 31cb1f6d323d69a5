"""Damaged and unfinished steps: which of them may be removed, and why the others stay."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.commit import find_last_write, find_unfinished, is_under_way, why_unfinished_kept
from shardckpt.engine import find_incomplete_files, format_seconds, is_damage
from shardckpt.errors import (
    BrokenPluginError,
    CheckpointingException,
    CorruptCheckpointError,
    RefusedByPolicyError,
    StorageError,
    UnknownBackendError,
    VersionTooNewError,
    VersionTooOldError,
)
from shardckpt.maintenance import is_marked
from shardckpt.manager.listing import summarize_step
from shardckpt.manifest import MARKER_LIMIT, MARKER_NAME, RECORD_LIMIT, RECORD_NAME, Manifest, Marker, Record
from shardckpt.plugins import choose_reader, hold_checkpoint, open_below, parse_file
from shardckpt.storage import (
    CheckpointReader,
    is_there,
    list_entries,
    open_directory,
    wrap_os_errors,
)

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manager.steps import StepCheckpoint, StepFolder
    from shardckpt.plugins import PluginManager

#: Hours since the last write to a step after which no save or copy to it can still run: each writes all the time.
HOURS = 1.0
_HOUR = 3600.0
#: The files that say what the others are, and can be written anew.
_DESCRIPTIONS = {MARKER_NAME, RECORD_NAME}


class Damage(NamedTuple):
    """The damage of a step that no load takes, or that ``ls`` does not call whole.

    Attributes:
        fault: What ``ls`` says of it.
        kept: Why it may not be removed; ``""`` if it may.
    """

    fault: str
    kept: str = ""


def find_damage(folder: StepFolder, step: StepCheckpoint, older_than: float | None = None) -> Damage | None:
    """Return what is wrong with a step: it is damaged, was never finished, or is marked as failed. Not collective.

    Args:
        older_than: Hours since the last write after which a save or a copy to it cannot still run; by default
            :data:`HOURS`, and of a save to a store whose process is named there, ``SHARDCKPT_LEFTOVER_HOURS``.

    Returns:
        What was found; None if a load takes it, and ``ls`` calls it whole.
    """
    directory = folder.path(step.step)
    found = summarize_step(folder, step.step)
    if found.state not in ("damaged", "incomplete"):
        if step.is_loadable:
            return None if step.is_sound else Damage(str(step.mark))
        return Damage("", (str(step.error or step.refusal).splitlines() or [""])[0])
    fault = f"{found.state}: {found.reason.removeprefix('is ')}"
    if found.state == "incomplete" and not _is_of_save(directory):
        return Damage(fault, "nothing in it shows that a save wrote it: remove it by hand")
    if mendable := _explain_mendable(directory, folder.plugins):
        return Damage(fault, f"{mendable}; {fault}")
    if step.is_sound:
        return Damage(fault, f"a load may still take it; {fault}")
    return Damage(fault, _find_writer(directory, older_than))


def _is_of_save(directory: Path) -> bool:
    """Return whether the names in a directory are those of a checkpoint; a step's name may be that of a log folder."""
    return is_under_way(directory) or is_marked(list_entries(directory))


def _explain_mendable(directory: Path, plugins: PluginManager) -> str:
    """Return why a checkpoint may be mended, as where nothing but its descriptions is lost; ``""`` if it cannot be."""
    try:
        with wrap_os_errors("look at", directory):
            place, manifest = _read_best_description(directory, plugins)
        # a record has all files and their sizes, whichever strategy wrote them
        strategy = choose_reader(directory, manifest, plugins) if manifest.record is None else None
        with CheckpointReader(place, manifest, verify=False) as reader:
            incomplete = {file.name for file in find_incomplete_files(strategy, reader)}
    except (
        UnknownBackendError,
        VersionTooNewError,
        VersionTooOldError,
        BrokenPluginError,
        RefusedByPolicyError,
    ) as exc:
        return f"nothing installed can say what is left of it: {str(exc).splitlines()[0]}"
    except CheckpointingException as exc:  # the index may be lost or damaged, too, or the store may not answer
        is_answer = not isinstance(exc, StorageError) or is_damage(exc)
        return "" if is_answer else f"what is left of it cannot be read now: {str(exc).splitlines()[0]}"
    if not incomplete <= _DESCRIPTIONS:
        return ""
    if manifest.record is not None:  # what is wrong with the marker says how to repair it
        return "its data is all there"
    return (
        f"its data is all there: `shardckpt convert {directory} NEW` writes it anew, or says what it needs; else "
        "remove it by hand"
    )


def _read_best_description(directory: Path, plugins: PluginManager) -> tuple[Path, Manifest]:
    """Return what the first of a checkpoint's descriptions that can be read says, or else its content."""
    place = open_directory(directory)
    with suppress(CorruptCheckpointError):
        if is_there(place / RECORD_NAME):
            record = parse_file(Record.parse, place / RECORD_NAME, RECORD_LIMIT)
            return place, Manifest(backend=record.backend, version=record.version, record=record)
    marker = None
    with suppress(CorruptCheckpointError):
        if is_there(place / MARKER_NAME):
            marker = parse_file(Marker.parse, place / MARKER_NAME, MARKER_LIMIT)
    if marker is None:
        return hold_checkpoint(directory, plugins)
    if marker.shardckpt_generation is None:
        return place, Manifest(backend=marker.sharded_backend, version=marker.sharded_backend_version)
    return _read_best_description(open_below(directory, marker.shardckpt_generation, plugins), plugins)


def _find_writer(directory: Path, older_than: float | None) -> str:
    """Return why a save, or a copy, may still write to a directory; ``""`` if none does."""
    begun = find_unfinished(directory)
    if begun is not None and (begun.is_removal or begun.owners):
        return why_unfinished_kept(begun, older_than)
    written = find_last_write(directory)
    limit = HOURS if older_than is None else older_than
    if limit <= 0:  # clocks of other hosts may be ahead
        return ""
    if written is None:
        return "nothing says when it was written: --older-than 0 removes it"
    age = max(time.time() - written, 0)
    if age >= limit * _HOUR:
        return ""
    return (
        f"it was written to {format_seconds(age)} ago, and a save or a copy may go on: it goes after "
        f"{format_seconds(limit * _HOUR)}, or at once by --older-than 0"
    )

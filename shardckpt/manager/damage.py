"""Damaged and unfinished steps: which of them may be removed, and why the others stay."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.commit.unfinished import explain_unfinished_kept, find_unfinished
from shardckpt.commit.upload import is_under_way
from shardckpt.engine.amounts import format_seconds
from shardckpt.maintenance.inside import is_marked
from shardckpt.maintenance.mending import explain_mendable
from shardckpt.manager.listing import summarize_step
from shardckpt.storage.disk_usage import find_last_write
from shardckpt.storage.places import list_entries

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manager.marks import Mark
    from shardckpt.manager.steps import StepCheckpoint, StepFolder
    from shardckpt.plugins.manager import PluginManager

#: Hours since the last write to a step after which no save or copy to it can still run: each writes all the time.
HOURS = 1.0
_HOUR = 3600.0


class Damage(NamedTuple):
    """The damage of a step that no load takes, or that ``ls`` does not call whole.

    ``fault`` is the text that ``ls`` shows, ``kept`` why it may not be removed; ``""`` if it may.
    """

    fault: str
    kept: str = ""


def find_damage(folder: StepFolder, step: StepCheckpoint, older_than: float | None = None) -> Damage | None:
    """Return the damage of a step; None if a load takes it and ``ls`` calls it whole. Not collective.

    It is damaged, was never finished, or is marked as failed. ``older_than`` is the hours since the last write after
    which a save or a copy to it cannot still run; by default :data:`HOURS`, and of a save to a store whose process is
    named there, ``SHARDCKPT_LEFTOVER_HOURS``.
    """
    directory = folder.path(step.step)
    found = summarize_step(folder, step.step)
    if found.state not in ("damaged", "incomplete"):
        if step.is_loadable:
            return None if step.mark is None or step.is_sound else _judge_mark(directory, step.mark, folder.plugins)
        return Damage("", (str(step.error or step.refusal).splitlines() or [""])[0])
    fault = f"{found.state}: {found.reason.removeprefix('is ')}"
    # a log folder may be named like a step
    if found.state == "incomplete" and not (is_under_way(directory) or is_marked(list_entries(directory))):
        return Damage(fault, "nothing in it shows that a save wrote it: remove it by hand")
    if mendable := explain_mendable(directory, folder.plugins):
        return Damage(fault, f"{mendable}; {fault}")
    if step.is_sound:
        return Damage(fault, f"a load may still take it; {fault}")
    return Damage(fault, _find_writer(directory, older_than))


def _judge_mark(directory: Path, mark: Mark, plugins: PluginManager) -> Damage:
    """Return the damage that a verification found in a step whose files have their sizes."""
    mendable = explain_mendable(directory, plugins, mark.damaged) if mark.damaged else ""
    return Damage(str(mark), mendable and f"{mendable}; {mark}")


def _find_writer(directory: Path, older_than: float | None) -> str:
    """Return why a save, or a copy, may still write to a directory; ``""`` if none does."""
    begun = find_unfinished(directory)
    if begun is not None and (begun.is_removal or begun.owners):
        return explain_unfinished_kept(begun, older_than)
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
        f"it was written to {format_seconds(age)} ago, and a save or a copy may go on: it is removed after "
        f"{format_seconds(limit * _HOUR)}, or at once by --older-than 0"
    )

"""The words ``latest`` and ``best`` for steps, in paths and URLs of checkpoints that are read: ``runs/latest``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardckpt.commit.staging_names import NAME_MAX
from shardckpt.engine.locations import find_local, locate
from shardckpt.errors import (
    CheckpointingException,
    NotACheckpointError,
    StorageError,
    listed,
    name_call,
    name_known,
)
from shardckpt.maintenance.inside import FILE_SUFFIXES
from shardckpt.manager.listing import list_checkpoints
from shardckpt.manager.step_links import choose_best
from shardckpt.manager.step_names import parse_step, split_path
from shardckpt.manager.steps import StepFolder
from shardckpt.manifest.names import LATEST, LINKS
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.storage.places import can_list_folders

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manager.summaries import CheckpointSummary


def find_named_step(path: str) -> str:
    """Return the path of the step that ``FOLDER/latest`` or ``FOLDER/best`` stands for; any other path as it is.

    An entry of that name goes first: a directory, a link, or a file. A file with the name of a directory next to it, as
    DeepSpeed and ``latest_pointer`` write it, stands for that. Else ``latest`` is the highest step that is whole and
    not marked as failed, whoever wrote it, and ``best`` the one of ``CheckpointManager.best_step``.

    Args:
        path: A path or URL.

    Raises:
        CheckpointingException: ``best`` is asked for, and the steps do not say by which metric, or none has it.
        NotACheckpointError: There are checkpoints, and no step that is whole.
        StorageError: The folder cannot be listed.
    """
    folder, word = split_path(path)
    if word not in LINKS:
        return path
    place = find_local(path)
    if place is None:
        if locate(path, get_plugin_manager()).is_dir():
            return path
    elif place.exists():
        return _follow_pointer(path, folder, place)
    elif (around := find_local(folder)) is None or not around.is_dir():
        return path
    try:
        found = list_checkpoints(folder)
    except StorageError:
        if place is not None:
            raise
        found = []  # whoever opens the URL reports the missing step
    # not by the steps in their records: a copy has the step that it was made of, too
    named = [each for each in found if parse_step(_cut_suffix(each.name)) is not None]
    sound = [each for each in named if each.state == "whole" and not each.has_failed and each.step is not None]
    if not sound and (there := [each for each in named if each.is_checkpoint]):
        states = [f"{each.name}: {'failed' if each.has_failed else each.state}" for each in there]
        raise NotACheckpointError(
            f"{folder} has no {word} step: none is whole ({listed(states, limit=6)}); {name_call('ls', folder)} says "
            "more"
        )
    if not sound:
        return path  # whoever opens it reports the missing step
    chosen = sound[-1] if word == LATEST else _find_best(folder, sound)
    return path.rstrip("/").removesuffix(word) + chosen.name


def refuse_named_step(path: str) -> None:
    """Raise if a path that a verb is to write stands for a step next to it: a step would be replaced, or lose its name.

    A directory by the name ``latest`` or ``best`` stands for itself.
    """
    folder, word = split_path(path)
    if word not in LINKS:
        return
    steps = StepFolder(folder, get_plugin_manager())
    if not can_list_folders(steps.place):
        return  # no step there is found by a word
    names = steps.directories()
    if word in names and not (steps.place / word).is_symlink():
        return
    if any(parse_step(name) is not None for name in names):
        raise CheckpointingException(
            f"{path} stands for a step of its folder, and nothing was written: give the step itself where it is to "
            "change, or another name"
        )


def _cut_suffix(name: str) -> str:
    suffix = next((each for each in FILE_SUFFIXES if name.endswith(each)), "")
    return name.removesuffix(suffix)


def _follow_pointer(path: str, folder: str, place: Path) -> str:
    """Return the directory next to a file that the file names, or the path itself."""
    if not place.is_file():
        return path
    with wrap_os_errors("read", place), place.open("rb") as file:
        name = file.read(NAME_MAX + 1).decode(errors="replace").strip()
    is_name = name.isprintable() and "/" not in name and name not in ("", ".", "..") and len(name.encode()) <= NAME_MAX
    return f"{folder}/{name}" if is_name and (place.parent / name).is_dir() else path


def _find_best(folder: str, sound: list[CheckpointSummary]) -> CheckpointSummary:
    metrics = {number: each.metrics for number, each in enumerate(sound)}  # in ascending order of their steps
    best = choose_best(metrics, {number: each.ranking for number, each in enumerate(sound)})
    if best is None:
        names = Counter(name for each in sound for name in each.metrics)
        first = max(names, key=names.__getitem__, default="NAME")  # as ls chooses the one that it shows
        advice = (
            "CheckpointConfig(best_metric=...) of the manager that saves them does. "
            f"{name_call('ls', folder, '--metric', first)} (or {first}:max) shows the best by one: name that step in "
            "place of best "
            f"{name_known('', names, 'metrics')}"
        )
        raise CheckpointingException(
            f"{folder}: nothing there is named best, and "
            + (f"no step says which is: {advice}" if names else "no step there has metrics, by which one would be")
        )
    return sound[best]

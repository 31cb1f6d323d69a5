"""The links ``latest`` and ``best`` of a folder of steps, which a manager keeps with ``links=True``.

Each is a relative symbolic link to a step's directory, replaced in one rename, so that it leads to the older step or to
the newer one whenever the process is killed. It is moved before the step that it leads to is removed. A store has no
links: there, and where no link is kept, :mod:`shardckpt.manager.named_steps` finds the steps by their records.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException
from shardckpt.manager.metrics import rank_steps, read_settings
from shardckpt.storage import on_store, sync_directory, wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from shardckpt.manager.steps import StepCheckpoint, StepFolder

logger = logging.getLogger(__name__)

LATEST, BEST = LINKS = ("latest", "best")


def choose_best(metrics: Mapping[int, Mapping[str, Any]], rankings: Mapping[int, tuple[str, str] | None]) -> int | None:
    """Return the best step by the rule of ``CheckpointManager.best_step``, in the configuration of the newest save.

    Args:
        metrics: The metrics of each step that a load takes.
        rankings: The metric and the mode, ``min`` or ``max``, that the configuration of each names, if it names one.

    Returns:
        The step; None if no configuration names a metric, or no step has it.
    """
    named = [ranking for step in sorted(metrics) if (ranking := rankings[step]) is not None]
    return next(iter(rank_steps(metrics, *named[-1])), None) if named else None


def find_own_links(folder: StepFolder, steps: Collection[StepCheckpoint]) -> tuple[str, ...]:
    """Return the names of the links that a manager of the folder keeps, as the newest sound of its steps says."""
    newest = max((each for each in steps if each.is_sound), key=lambda each: each.step, default=None)
    if newest is None or on_store(folder.place) is not None or not read_settings(newest.content).links:
        return ()
    return (*LINKS, *map(_name_temporary, LINKS))


def update_links(folder: StepFolder, steps: Collection[StepCheckpoint]) -> None:
    """Let the links lead to the latest and the best of some steps; a warning names a link that cannot be made.

    Args:
        folder: The folder, on this machine.
        steps: Those that are there, and stay; of these the sound ones count.
    """
    sound = {each.step: each for each in steps if each.is_sound}
    best = choose_best(
        {step: each.metrics for step, each in sound.items()},
        {step: read_settings(each.content).ranking for step, each in sound.items()},
    )
    for name, step in ((LATEST, max(sound, default=None)), (BEST, best)):
        _try_to_put_link(folder.place / name, None if step is None else folder.names.name(step))


def refuse_other_files(folder: StepFolder) -> None:
    """Raise if something else has the name of a link.

    Raises:
        CheckpointingException: A directory or file has it, which no link replaces.
    """
    if on_store(folder.place) is None:
        for name in LINKS:
            _refuse_other_file(folder.place / name)


def _refuse_other_file(link: Path) -> None:
    if not os.path.lexists(link):
        return
    if not link.is_symlink():
        what = "directory" if link.is_dir() else "file"
    elif link.readlink().parent != Path():
        what = f"link to {link.readlink()}"  # a link of ours leads to what is beside it
    else:
        return
    raise CheckpointingException(
        f"{link} is a {what}, which links=True does not replace: move it, or leave links False"
    )


def _try_to_put_link(link: Path, target: str | None) -> None:
    """Make a link to what is beside it, or log a warning; None for the target removes it."""
    try:
        _refuse_other_file(link)
        with wrap_os_errors("change", link):
            if target is None:
                link.unlink(missing_ok=True)
            elif not link.is_symlink() or str(link.readlink()) != target:
                temporary = link.with_name(_name_temporary(link.name))
                temporary.unlink(missing_ok=True)  # of a process that was killed
                temporary.symlink_to(target)
                temporary.replace(link)
                sync_directory(link.parent)
    except CheckpointingException as exc:
        logger.warning("the link %s is not kept up to date: %s", link, exc)


def _name_temporary(name: str) -> str:
    return f".{name}.shardckpt-tmp"

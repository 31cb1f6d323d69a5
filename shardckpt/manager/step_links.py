"""The links ``latest`` and ``best`` of a folder of steps, which a manager keeps with ``links=True``.

Each is a relative symbolic link to a step's directory, replaced in one rename, so that it leads to the older step or to
the newer one whenever the process is killed. It is moved before the step that it leads to is removed. A store has no
links: there, and where no link is kept, :mod:`shardckpt.manager.named_steps` finds the steps by their records.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, is_first_warning
from shardckpt.manager.metrics import rank_steps, read_settings
from shardckpt.manifest.names import BEST, LATEST, LINKS
from shardckpt.storage.abilities import has_links
from shardckpt.storage.filesystem import is_there, sync_directory, wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from shardckpt.manager.steps import StepCheckpoint, StepFolder

logger = logging.getLogger(__name__)


def choose_best(metrics: Mapping[int, Mapping[str, Any]], rankings: Mapping[int, tuple[str, str] | None]) -> int | None:
    """Return the best step by the rule of ``CheckpointManager.best_step``, in the configuration of the newest save.

    ``metrics`` are the metrics of each step that a load takes. ``rankings`` has the metric and the mode, ``min`` or
    ``max``, of each configuration that names one. The result is None if none does, or no step has it.
    """
    named = [ranking for step in sorted(metrics) if (ranking := rankings[step]) is not None]
    return next(iter(rank_steps(metrics, *named[-1])), None) if named else None


def find_own_links(folder: StepFolder, steps: Collection[StepCheckpoint]) -> tuple[str, ...]:
    """Return the names of the links that a manager of the folder keeps, as the newest whole of its steps says."""
    own = [each for each in steps if each.is_whole and not each.is_foreign]
    newest = max(own, key=lambda each: each.step, default=None)
    if newest is None or not has_links(folder.place) or not read_settings(newest.content).links:
        return ()
    return (*LINKS, *map(_name_temporary, LINKS))


def choose_targets(folder: StepFolder, steps: Collection[StepCheckpoint]) -> dict[str, str]:
    """Return the names of the directories that ``latest`` and ``best`` stand for if these steps are all there are.

    The whole ones count, also where a strategy is not installed here: the targets of these names must not depend on
    this process.
    """
    sound = [each for each in steps if each.is_whole]
    # a manager's links lead to steps that it can load
    whole = {each.step: each for each in [each for each in sound if not each.is_foreign] or sound}
    best = choose_best(
        {step: each.metrics for step, each in whole.items()},
        {step: read_settings(each.content).ranking for step, each in whole.items()},
    )
    chosen = {LATEST: max(whole, default=None), BEST: best}
    return {word: folder.names.name(step) for word, step in chosen.items() if step is not None}


def find_moves(
    folder: StepFolder, before: Collection[StepCheckpoint], after: Collection[StepCheckpoint]
) -> dict[str, dict[str, str]]:
    """Return which words stand for another step once some steps are gone.

    By the name of a step's directory, it has the words that stood for it, each with the name of that for which it
    stands then, or ``""``. A link or file of the user's that has the name of a word is not changed.
    """
    moves: dict[str, dict[str, str]] = {}
    own = find_own_links(folder, before)
    new = choose_targets(folder, after)
    for word, name in choose_targets(folder, before).items():
        is_others = has_links(folder.place) and word not in own and is_there(folder.place / word)
        if not is_others and new.get(word) != name:
            moves.setdefault(name, {})[word] = new.get(word, "")
    return moves


def update_links(folder: StepFolder, steps: Collection[StepCheckpoint]) -> None:
    """Let the links lead to the latest and the best of some steps; a warning names a link that cannot be made.

    Another one, once, names a newer step that is damaged, or that could not be inspected.

    Where none of the steps is of a manager with links, they are removed: the next one would not know them as its own.
    """
    targets = choose_targets(folder, steps) if _have_links(steps) else {}
    newest = max((each.step for each in steps if each.is_whole), default=0)
    for each in steps:
        is_left_out = targets and (each.is_damaged or each.is_unread) and each.step > newest
        if is_left_out and is_first_warning(__name__, str(folder), each.step):
            logger.warning("the links of %s do not lead to step %d: %s", folder, each.step, each.error)
    for name in LINKS:
        _try_to_put_link(folder.place / name, targets.get(name))


def begin_links(folder: StepFolder) -> None:
    """Let the links lead to the latest and the best existing step: a killed run may not have updated them.

    In a folder in which no step is of a manager with links, they begin with the first that is saved: a link that is
    there is the user's, unless one of the two leads to a step that is gone or damaged, which may have been of such a
    manager. Then both are removed until that save. It is an error if a directory, a file, or a link that no manager
    made has the name of a link: it is not replaced.
    """
    if not has_links(folder.place):
        logger.warning(
            "links=True writes nothing to %s: object stores have no links. The commands of shardckpt take %s/latest "
            "and /best without them; for other tools latest_pointer='latest' in its place keeps an object that names "
            "the newest step",
            folder,
            folder,
        )
        return
    steps = [folder.inspect_step(step) for step in folder.steps()]
    has_own = _have_links(steps) or any(_leads_to_lost(folder, steps, folder.place / name) for name in LINKS)
    for name in LINKS:
        _refuse_other_file(folder.place / name, has_own=has_own)
    if has_own:
        update_links(folder, steps)


def _have_links(steps: Collection[StepCheckpoint]) -> bool:
    """Return whether a manager that keeps links has saved any of some steps: links are made after its commits alone."""
    return any(read_settings(each.content).links for each in steps)


def _leads_to_lost(folder: StepFolder, steps: Collection[StepCheckpoint], link: Path) -> bool:
    """Return whether a link leads to a step next to it that is gone, or no longer says who saved it."""
    if not link.is_symlink() or (step := folder.names.parse(str(link.readlink()))) is None:
        return False
    found = next((each for each in steps if each.step == step), None)
    return found is None or (found.error is not None and found.manifest is None)


def _refuse_other_file(link: Path, *, has_own: bool = True) -> None:
    if not is_there(link):
        return
    if not link.is_symlink():
        what = "directory" if link.is_dir() else "file"
    elif not has_own or link.readlink().parent != Path():
        what = f"link to {link.readlink()}"  # a link of ours leads to a step of its folder
    else:
        return
    raise CheckpointingException(
        f"{link} is a {what}, which links=True does not replace: move it, or leave links False"
    )


def _try_to_put_link(link: Path, target: str | None) -> None:
    """Make a link to a name next to it, or log a warning; None for the target removes it."""
    is_put = False
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
                is_put = True
                sync_directory(link.parent)
    except CheckpointingException as exc:
        # another replica of the training was first
        if not is_put and link.is_symlink() and str(link.readlink()) == target:
            return
        logger.warning("the link %s is not kept up to date: %s", link, exc)


def _name_temporary(name: str) -> str:
    return f".{name}.shardckpt-tmp"

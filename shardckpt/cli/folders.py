"""Folders of steps: a path that must be one, and steps of one that a path names by a word."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CannotLoadError, CheckpointingException, NotACheckpointError, find_nearest
from shardckpt.manifest.names import LINKS

if TYPE_CHECKING:
    from collections.abc import Iterator


def name_steps(options: Any) -> None:
    """Replace ``FOLDER/latest`` and ``FOLDER/best`` in the arguments of a verb by the paths of the steps.

    Of the options, ``reads`` has the names of the arguments that are checkpoints, or lists of these, and ``writes``
    the name of the one that becomes a checkpoint. It is an error if there is no such step, or it is not known which it
    is; if the word is misspelt; or if the verb is to write to such a name next to steps.
    """
    if hasattr(options, "writes") and _is_word(getattr(options, options.writes)):
        from shardckpt.manager.named_steps import refuse_named_step

        refuse_named_step(getattr(options, options.writes))
    for name in getattr(options, "reads", ()):
        given = getattr(options, name)
        paths = given if isinstance(given, list) else [given]
        for path in paths:
            if not os.path.exists(path):  # noqa: PTH110 - a path that is there needs none of the imports
                refuse_lost_link(path)
                _refuse_misspelt_word(path)
        if any(map(_is_word, paths)):
            from shardckpt.manager.named_steps import find_named_step

            found = [find_named_step(path) for path in paths]
            setattr(options, name, found if isinstance(given, list) else found[0])


def _is_word(path: str) -> bool:
    return path.rstrip("/").rpartition("/")[2] in LINKS


def refuse_lost_link(path: str) -> None:
    """Raise if a path, or a folder that it goes through, is a broken link: errors name its target alone."""
    from shardckpt.engine.locations import find_local

    if find_local(path) is None:
        return
    given = Path(path).expanduser()
    for each in (given, *given.parents):
        if each.is_symlink() and not os.path.exists(each):  # noqa: PTH110 - Path's raises for a loop
            raise NotACheckpointError(f"{each} is a link that leads nowhere: to {each.readlink()}")


def _refuse_misspelt_word(path: str) -> None:
    """Raise if nothing is at a local path in a folder of steps, and its last part is most like one of the words."""
    from shardckpt.engine.locations import find_local
    from shardckpt.manager.step_names import parse_step
    from shardckpt.storage.filesystem import wrap_os_errors

    place = find_local(path)
    if place is None or not place.parent.is_dir():
        return
    with wrap_os_errors("list", place.parent):
        names = sorted(each.name for each in place.parent.iterdir())
    if all(parse_step(name) is None for name in names):
        return
    if (nearest := find_nearest(place.name, [*LINKS, *names])) in LINKS and place.name != nearest:
        folder = path.rstrip("/").removesuffix(place.name)
        raise NotACheckpointError(f"{path} does not exist: did you mean {folder}{nearest}?")


def refuse_checkpoint(path: str) -> None:
    """Raise if a path leads to a checkpoint without steps in it: its folder was meant."""
    from shardckpt.cli.ls import list_folder
    from shardckpt.engine.locations import find_local, locate
    from shardckpt.plugins.manager import get_plugin_manager

    own = find_local(path) or locate(path, get_plugin_manager())
    if any(each.is_checkpoint and each.path == str(own) for each in list_folder(path)):
        from shardckpt.manager.any_steps import AnySteps  # it imports torch

        # a Trainer's last model lies in the folder of its steps
        if any(each.steps() for each in AnySteps(path, get_plugin_manager()).list_namings()):
            return
        raise CheckpointingException(
            f"{path} is a checkpoint, not a folder of steps, and nothing was done: give the folder that it is in"
        )


@contextmanager
def named_folders(path: str) -> Iterator[None]:
    """Describe a local folder in which the block finds no checkpoint: most often it is a folder of some."""
    from shardckpt.engine.locations import find_local
    from shardckpt.maintenance.foreign import describe_folder
    from shardckpt.manifest.names import MARKER_NAME

    try:
        yield
    except CannotLoadError as exc:
        place = find_local(path)
        if place is None or not place.is_dir():
            raise
        names = [each.name for each in place.iterdir()]
        if MARKER_NAME not in names and (what := describe_folder(place, names)):
            raise NotACheckpointError(f"{path} is {what}") from exc
        raise

"""Folders of steps: a path that must be one, and steps of one that a path names by a word."""

from __future__ import annotations

from typing import Any

#: What the paths end with that stand for steps.
_WORDS = ("/latest", "/best")


def name_steps(options: Any) -> None:
    """Put the paths of steps in the place of ``FOLDER/latest`` and ``FOLDER/best`` in what a verb reads.

    Args:
        options: Those of a verb; ``reads`` has the names of its arguments that are checkpoints, or lists of these.

    Raises:
        CheckpointingException: there is no such step, or it is not known which it is.
    """
    for name in getattr(options, "reads", ()):
        given = getattr(options, name)
        paths = given if isinstance(given, list) else [given]
        if any(f"/{path}".rstrip("/").endswith(_WORDS) for path in paths):
            from shardckpt.manager import find_named_step

            found = [find_named_step(path) for path in paths]
            setattr(options, name, found if isinstance(given, list) else found[0])


def refuse_checkpoint(path: str) -> None:
    """Raise if a path is that of a checkpoint: the folder that it is in was meant.

    Raises:
        CheckpointingException: It is, or the path cannot be listed.
    """
    from shardckpt.engine import locate
    from shardckpt.errors import CheckpointingException
    from shardckpt.manager import list_checkpoints
    from shardckpt.plugins import get_plugin_manager

    own = locate(path, get_plugin_manager())
    if any(each.is_checkpoint and each.path == str(own) for each in list_checkpoints(path)):
        raise CheckpointingException(
            f"{path} is a checkpoint, not a folder of steps, and nothing was done: give the folder that it is in"
        )

"""Folders of steps, which verbs take that change what is in them."""

from __future__ import annotations


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

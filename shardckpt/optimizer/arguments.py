"""What callers of torch's function give: where the checkpoint is, and a planner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from shardckpt.errors import CheckpointingException


def location(source: Any) -> str | os.PathLike[str]:
    """The directory or URL of a checkpoint: itself, or what torch's FileSystemReader (FsspecReader) reads.

    Raises:
        CheckpointingException: it is something else.
    """
    if isinstance(source, (str, os.PathLike)):
        return source
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import

    if isinstance(source, FileSystemReader):
        return source.path
    raise CheckpointingException(
        f"cannot load through a {type(source).__name__}: give the checkpoint's directory or URL, or torch's "
        "FileSystemReader of it (remote stores are served by plugins: shardckpt_filesystem)"
    )


def refuse_planner(planner: Any) -> None:
    """Refuse a planner that would change what is loaded; torch's default one does not.

    Raises:
        CheckpointingException: it is another.
    """
    if planner is None:
        return
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    if type(planner) is not DefaultLoadPlanner or not planner.flatten_state_dict:
        raise CheckpointingException(
            f"the planner {type(planner).__module__}.{type(planner).__qualname__} would not be asked: what is read "
            "follows from the model's state dict; leave it out, or use torch's own load_sharded_optimizer_state_dict"
        )


def parameters(model_state_dict: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model's state dict, by full name.

    Raises:
        CheckpointingException: it is none.
    """
    if not isinstance(model_state_dict, Mapping):
        raise CheckpointingException(
            f"expected the model's state dict (get_model_state_dict), got a {type(model_state_dict).__name__}"
        )
    return {name: value for name, value in model_state_dict.items() if isinstance(value, torch.Tensor)}


__all__ = ["location", "parameters", "refuse_planner"]

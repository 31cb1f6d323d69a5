"""Arguments of torch's ``load_sharded_optimizer_state_dict``: the checkpoint, the planner, the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from shardckpt.errors import CheckpointingException


def get_location(source: Any) -> str | os.PathLike[str]:
    """Return the directory or URL of a checkpoint.

    Args:
        source: The directory or URL, or torch's FileSystemReader (FsspecReader) of it.

    Raises:
        CheckpointingException: ``source`` is something else.
    """
    if isinstance(source, (str, os.PathLike)):
        return source
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import

    if isinstance(source, FileSystemReader):
        return source.path
    raise CheckpointingException(
        f"cannot load through a {type(source).__name__}: give the checkpoint's directory or URL, or torch's "
        "FileSystemReader of it (plugins read remote stores: shardckpt_filesystem)"
    )


def refuse_planner(planner: Any) -> None:
    """Raise unless the planner is None or torch's default one, which changes nothing.

    Raises:
        CheckpointingException: it is another planner, which would not be called.
    """
    if planner is None:
        return
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    if type(planner) is not DefaultLoadPlanner or not planner.flatten_state_dict:
        raise CheckpointingException(
            f"the planner {type(planner).__module__}.{type(planner).__qualname__} would not be called: the model's "
            "state dict decides what is read; leave it out, or use torch's own load_sharded_optimizer_state_dict"
        )


def get_parameters(model_state_dict: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state dict, by full name.

    Raises:
        CheckpointingException: ``model_state_dict`` is not a mapping.
    """
    if not isinstance(model_state_dict, Mapping):
        raise CheckpointingException(
            f"expected the model's state dict (get_model_state_dict), got a {type(model_state_dict).__name__}"
        )
    return {name: value for name, value in model_state_dict.items() if isinstance(value, torch.Tensor)}


__all__ = ["get_location", "get_parameters", "refuse_planner"]

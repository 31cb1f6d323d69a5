"""Reads the checkpoints of torch_checkpointing (https://github.com/meta-pytorch/torch_checkpointing)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt_torch_checkpointing.load import TorchCheckpointingLoadStrategy

# lazy: a plugin's registration must not import torch
__getattr__ = lazy_getattr(__name__, {"load": ("TorchCheckpointingLoadStrategy",)})

__all__ = ["TorchCheckpointingLoadStrategy"]

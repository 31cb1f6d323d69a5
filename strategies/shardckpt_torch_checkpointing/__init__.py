"""Reads the checkpoints of torch_checkpointing (https://github.com/meta-pytorch/torch_checkpointing)."""

from shardckpt.lazy import attach_stub

# lazy: a plugin's registration must not import torch
__getattr__, __dir__, __all__ = attach_stub(__name__)

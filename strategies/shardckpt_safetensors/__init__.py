"""The format (safetensors, 1): checkpoints without pickles, in files that every reader of safetensors opens."""

from shardckpt.lazy import attach_stub

# lazy: a plugin's registration must not import torch
__getattr__, __dir__, __all__ = attach_stub(__name__)

"""The format (torch_dist, 1), which Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint write and read."""

from shardckpt.lazy import attach_stub

# lazy: a plugin's registration must not import torch
__getattr__, __dir__, __all__ = attach_stub(__name__)

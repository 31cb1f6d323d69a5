"""The format (zarr, 1), which Megatron-Core wrote by default before 0.7 and on request up to 0.15. It is only read."""

from shardckpt.lazy import attach_stub

# lazy: a plugin's registration must not import torch
__getattr__, __dir__, __all__ = attach_stub(__name__)

"""(ep, 1): the format of (torch_dist, 1) for expert parallelism: each tensor holds all experts, ordered by number."""

from shardckpt.lazy import attach_stub

# lazy: importing this package imports no torch
__getattr__, __dir__, __all__ = attach_stub(__name__)

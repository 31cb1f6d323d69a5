"""Describe torch's modules, optimizers and distributed tensors as shards, and restore the loaded values into them."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

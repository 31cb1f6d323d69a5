"""Plugins: the hooks that they implement, how they are found, and which strategy reads a checkpoint."""

from shardckpt.lazy import attach_stub

# lazy: ``shardckpt.hookimpl`` must not import torch
__getattr__, __dir__, __all__ = attach_stub(__name__)

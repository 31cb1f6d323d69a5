"""Checkpoints in the memory of ranks and on the disks of their nodes: tensor-aware state dicts, local checkpoints."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

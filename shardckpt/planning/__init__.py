"""Arithmetic of shards: boxes in global coordinates, their overlaps, and whether they fill a global tensor exactly."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

"""Checks across ranks before bytes move: sharding, replicas, keys, common state."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

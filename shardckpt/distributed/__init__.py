"""Ranks: collectives, process groups, and one error for all of them."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

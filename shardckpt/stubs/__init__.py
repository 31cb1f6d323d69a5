"""Inert stubs for values of classes that a checkpoint names and that are not imported."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

"""The engine: one save, from a state dict to a committed directory, and one load, back."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

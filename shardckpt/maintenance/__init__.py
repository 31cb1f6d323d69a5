"""Verify, convert, merge, migrate and compare checkpoints, and remove keys: the work of the commands, as functions."""

from shardckpt.lazy import attach_stub

# lazy: the face removes keys, and must not import the archives, which unpickle and which conversions read
__getattr__, __dir__, __all__ = attach_stub(__name__)

"""Plan the writes and reads of a rank: which bytes, in which files, in which order."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

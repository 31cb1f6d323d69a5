"""Chunks of tensors in files, whatever the format: the plan of a rank, of all ranks, and the reads of other ranks.

A format decides where an item lies in a file and how it is encoded; this package is the same for all box formats.
"""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

"""Chunks of tensors in files, whatever the format: what a rank stores, what all store, and how to read it elsewhere.

A format says where an item lies in a file and what its bytes are; what is here is the same for all that store boxes.
"""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

"""Chunks of tensors in files, whatever the format: the plan of a rank, of all ranks, and the reads of other ranks.

A format says where an item lies in a file and what its bytes are; what is here is the same for all that store boxes.
"""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)

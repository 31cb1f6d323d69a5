"""Checkpoints on every store that fsspec supports, and so on those of multi-storage-client (``msc://profile/path``)."""

from shardckpt.integrations.fsspec.plugin import shardckpt_filesystem

__all__ = ["shardckpt_filesystem"]

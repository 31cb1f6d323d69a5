"""megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusing_getattr

REFUSED = {"CachedMetadataFileSystemReader": "a load reads the metadata once, and never a stale one"}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = []

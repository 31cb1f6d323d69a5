"""Names of the files of a checkpoint of ours, as they are on disk."""

from __future__ import annotations

METADATA = ".metadata"
INDEX = "shardckpt-index.safetensors"
COMMON = "common.pt"
MARKER = "metadata.json"
RECORD = "shardckpt.json"

#: What the digests in shardckpt.json are of, beside data files.
DIGESTED = frozenset({METADATA, INDEX, COMMON})
#: What says that a checkpoint is there and complete, in any format.
MARKERS = frozenset({MARKER, RECORD})
#: What every checkpoint has, beside data files.
SHARED = DIGESTED | MARKERS


def data_file(rank: int) -> str:
    """The first data file of a rank."""
    return f"__{rank}_0.distcp"


__all__ = ["COMMON", "DIGESTED", "INDEX", "MARKER", "MARKERS", "METADATA", "RECORD", "SHARED", "data_file"]

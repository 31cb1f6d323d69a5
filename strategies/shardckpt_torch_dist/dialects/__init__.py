"""Read and write the index of a checkpoint: every dialect of ``.metadata``, in one form."""

from shardckpt_torch_dist.dialects.index_file import INDEX_FILE, dump
from shardckpt_torch_dist.dialects.metadata import (
    METADATA_FILE,
    STEPS,
    identify_save,
    needs_common_file,
    parse_metadata,
    read_index,
)
from shardckpt_torch_dist.dialects.metadata_pickle import encode
from shardckpt_torch_dist.dialects.stored import (
    COMMON_FILE,
    COMMON_KEY,
    Chunk,
    Chunks,
    Item,
    StoredIndex,
    StoredTensor,
    parse_object_key,
)

__all__ = [
    "COMMON_FILE",
    "COMMON_KEY",
    "INDEX_FILE",
    "METADATA_FILE",
    "STEPS",
    "Chunk",
    "Chunks",
    "Item",
    "StoredIndex",
    "StoredTensor",
    "dump",
    "encode",
    "identify_save",
    "needs_common_file",
    "parse_metadata",
    "parse_object_key",
    "read_index",
]

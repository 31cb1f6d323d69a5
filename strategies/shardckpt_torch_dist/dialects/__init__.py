"""Read and write the index of a checkpoint: every dialect of ``.metadata``, in one form."""

from shardckpt_torch_dist.dialects.index_file import INDEX_FILE, dump
from shardckpt_torch_dist.dialects.metadata import (
    METADATA_FILE,
    STEPS,
    index_of,
    needs_common_file,
    read_index,
    save_of,
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
    object_key,
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
    "index_of",
    "needs_common_file",
    "object_key",
    "read_index",
    "save_of",
]

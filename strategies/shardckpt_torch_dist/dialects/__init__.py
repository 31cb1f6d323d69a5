"""Read and write the index of a checkpoint: every dialect of ``.metadata``, in one form."""

from shardckpt_torch_dist.dialects.index_file import INDEX_FILE, encode_index
from shardckpt_torch_dist.dialects.metadata import (
    MAX_PATH_LENGTH,
    METADATA_FILE,
    has_own_index,
    needs_common_file,
    read_index,
    read_metadata,
)
from shardckpt_torch_dist.dialects.metadata_pickle import encode_metadata
from shardckpt_torch_dist.dialects.nested_state import DictKey, NestedState, nest_values
from shardckpt_torch_dist.dialects.stored import (
    COMMON_FILE,
    COMMON_KEY,
    StoredIndex,
    parse_object_key,
    to_dcp_tensor,
)

__all__ = [
    "COMMON_FILE",
    "COMMON_KEY",
    "INDEX_FILE",
    "MAX_PATH_LENGTH",
    "METADATA_FILE",
    "DictKey",
    "NestedState",
    "StoredIndex",
    "encode_index",
    "encode_metadata",
    "has_own_index",
    "needs_common_file",
    "nest_values",
    "parse_object_key",
    "read_index",
    "read_metadata",
    "to_dcp_tensor",
]

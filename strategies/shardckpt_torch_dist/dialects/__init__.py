"""Read and write the index of a checkpoint: every dialect of ``.metadata``, in one form."""

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr
from shardckpt_torch_dist.dialects.index_file import encode_index
from shardckpt_torch_dist.dialects.metadata import (
    MAX_PATH_LENGTH,
    METADATA_FILE,
    has_own_index,
    needs_common_file,
    read_index,
    read_metadata,
)
from shardckpt_torch_dist.dialects.nested_state import NestedState
from shardckpt_torch_dist.dialects.stored import (
    COMMON_KEY,
    StoredIndex,
    parse_object_key,
)
from shardckpt_torch_dist.file_names import COMMON_FILE, INDEX_FILE

if TYPE_CHECKING:
    from shardckpt_torch_dist.dialects.dcp_metadata import to_dcp_tensor
    from shardckpt_torch_dist.dialects.metadata_pickle import encode_metadata

# lazy: torch.distributed.checkpoint takes a third of the time of `import torch`, and reading needs none of it
__getattr__ = lazy_getattr(__name__, {"dcp_metadata": ("to_dcp_tensor",), "metadata_pickle": ("encode_metadata",)})

__all__ = [
    "COMMON_FILE",
    "COMMON_KEY",
    "INDEX_FILE",
    "MAX_PATH_LENGTH",
    "METADATA_FILE",
    "NestedState",
    "StoredIndex",
    "encode_index",
    "encode_metadata",
    "has_own_index",
    "needs_common_file",
    "parse_object_key",
    "read_index",
    "read_metadata",
    "to_dcp_tensor",
]

"""Export checkpoints to Hugging Face folders and load from them; convert checkpoints to plain state dicts and back."""

from shardckpt.huggingface.convert import dcp_to_torch_save, dcp_to_torch_state_dict, torch_save_to_dcp
from shardckpt.huggingface.dtypes import cast_to, get_dtype_size, parse_dtype
from shardckpt.huggingface.export import Exported, export_to_huggingface
from shardckpt.huggingface.header import parse_header
from shardckpt.huggingface.load import huggingface_index, load_from_huggingface
from shardckpt.huggingface.models import find_mapping
from shardckpt.huggingface.rules import Rule, RuleMapping
from shardckpt.huggingface.shards import get_shard_info, save_state_dict
from shardckpt.plugins import Identity, KeyMapEntry, KeyMapping
from shardckpt.storage import header_length

__all__ = [
    "Exported",
    "Identity",
    "KeyMapEntry",
    "KeyMapping",
    "Rule",
    "RuleMapping",
    "cast_to",
    "dcp_to_torch_save",
    "dcp_to_torch_state_dict",
    "export_to_huggingface",
    "find_mapping",
    "get_dtype_size",
    "get_shard_info",
    "header_length",
    "huggingface_index",
    "load_from_huggingface",
    "parse_dtype",
    "parse_header",
    "save_state_dict",
    "torch_save_to_dcp",
]

"""Export checkpoints to Hugging Face folders and load from them; convert checkpoints to plain state dicts and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr
from shardckpt.plugins import Identity, KeyMapEntry, KeyMapping
from shardckpt.storage import header_length

if TYPE_CHECKING:
    from shardckpt.huggingface.adapters import find_adapter_mapping
    from shardckpt.huggingface.architecture import own_process
    from shardckpt.huggingface.assets import list_assets, read_assets
    from shardckpt.huggingface.casts import find_model_dtype, parse_casts
    from shardckpt.huggingface.check import check_folder, check_weights
    from shardckpt.huggingface.config import HEADS, adapt_config, find_config, find_tied, read_config
    from shardckpt.huggingface.convert import (
        dcp_to_torch_save,
        dcp_to_torch_state_dict,
        torch_save_to_dcp,
    )
    from shardckpt.huggingface.dtypes import get_dtype_size, parse_dtype
    from shardckpt.huggingface.export import Exported, ExportedTensor, export_to_huggingface
    from shardckpt.huggingface.export_budget import LEAST_EXPORTING, LEAST_EXPORTING_ON_STORES
    from shardckpt.huggingface.folder import CONFIG, Folder, resolve_link
    from shardckpt.huggingface.header import FileLayout, lay_out, parse_header
    from shardckpt.huggingface.hub_tensor import HubTensor, read_hub_boxes
    from shardckpt.huggingface.load import huggingface_index, load_from_huggingface, read_hub_folder
    from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
    from shardckpt.huggingface.mapping_file import find_code
    from shardckpt.huggingface.megatron import MEGATRON_NAME, split_qkv, split_vocabulary
    from shardckpt.huggingface.models import MegatronMapping, find_mapping
    from shardckpt.huggingface.names import (
        ADAPTER,
        ADAPTER_WEIGHTS,
        assign_files,
        encode_weights_index,
        is_hub_folder,
        parse_leave_out,
    )
    from shardckpt.huggingface.options import ExportOptions, parse_options
    from shardckpt.huggingface.planning import plan_export, plan_tensors
    from shardckpt.huggingface.review import review_folder, review_others
    from shardckpt.huggingface.rules import Rule, RuleMapping
    from shardckpt.huggingface.sections import Sections, find_sections
    from shardckpt.huggingface.shards import get_shard_info, save_state_dict
    from shardckpt.huggingface.store_export import find_export
    from shardckpt.huggingface.structure import forget_structure, make_state_dict, nest_stored, plain_name
    from shardckpt.huggingface.torch_file import is_torch_file
    from shardckpt.huggingface.torch_save import TorchFile
    from shardckpt.huggingface.torch_strategy import TorchFileLoadStrategy, list_values
    from shardckpt.huggingface.weights import ModelCheckpoint
    from shardckpt.huggingface.whole_folder import StoredNames, name_for_trainer, read_all_of_folder

# lazy: a format that takes names of the Hub from here must not import the archives, which unpickle
__getattr__ = lazy_getattr(
    __name__,
    {
        "architecture": ("own_process",),
        "assets": ("list_assets", "read_assets"),
        "casts": ("find_model_dtype", "parse_casts"),
        "check": ("check_folder", "check_weights"),
        "config": ("HEADS", "adapt_config", "find_config", "find_tied", "read_config"),
        "convert": (
            "dcp_to_torch_save",
            "dcp_to_torch_state_dict",
            "torch_save_to_dcp",
        ),
        "dtypes": ("get_dtype_size", "parse_dtype"),
        "export": ("Exported", "ExportedTensor", "export_to_huggingface"),
        "export_budget": ("LEAST_EXPORTING", "LEAST_EXPORTING_ON_STORES"),
        "folder": ("CONFIG", "Folder", "resolve_link"),
        "header": ("FileLayout", "lay_out", "parse_header"),
        "hub_tensor": ("HubTensor", "read_hub_boxes"),
        "adapters": ("find_adapter_mapping",),
        "load": ("huggingface_index", "load_from_huggingface", "read_hub_folder"),
        "load_strategy": ("HuggingFaceLoadStrategy",),
        "mapping_file": ("find_code",),
        "megatron": ("MEGATRON_NAME", "split_qkv", "split_vocabulary"),
        "models": ("MegatronMapping", "find_mapping"),
        "names": (
            "ADAPTER",
            "ADAPTER_WEIGHTS",
            "assign_files",
            "encode_weights_index",
            "is_hub_folder",
            "parse_leave_out",
        ),
        "options": ("ExportOptions", "parse_options"),
        "planning": ("plan_export", "plan_tensors"),
        "review": ("review_folder", "review_others"),
        "rules": ("Rule", "RuleMapping"),
        "sections": ("Sections", "find_sections"),
        "store_export": ("find_export",),
        "shards": ("get_shard_info", "save_state_dict"),
        "structure": ("forget_structure", "make_state_dict", "nest_stored", "plain_name"),
        "torch_file": ("is_torch_file",),
        "torch_save": ("TorchFile",),
        "torch_strategy": ("TorchFileLoadStrategy", "list_values"),
        "weights": ("ModelCheckpoint",),
        "whole_folder": ("StoredNames", "name_for_trainer", "read_all_of_folder"),
    },
)

__all__ = [
    "ADAPTER",
    "ADAPTER_WEIGHTS",
    "CONFIG",
    "HEADS",
    "LEAST_EXPORTING",
    "LEAST_EXPORTING_ON_STORES",
    "MEGATRON_NAME",
    "ExportOptions",
    "Exported",
    "ExportedTensor",
    "FileLayout",
    "Folder",
    "HubTensor",
    "HuggingFaceLoadStrategy",
    "Identity",
    "KeyMapEntry",
    "KeyMapping",
    "MegatronMapping",
    "ModelCheckpoint",
    "Rule",
    "RuleMapping",
    "Sections",
    "StoredNames",
    "TorchFile",
    "TorchFileLoadStrategy",
    "adapt_config",
    "assign_files",
    "check_folder",
    "check_weights",
    "dcp_to_torch_save",
    "dcp_to_torch_state_dict",
    "encode_weights_index",
    "export_to_huggingface",
    "find_adapter_mapping",
    "find_code",
    "find_config",
    "find_export",
    "find_mapping",
    "find_model_dtype",
    "find_sections",
    "find_tied",
    "forget_structure",
    "get_dtype_size",
    "get_shard_info",
    "header_length",
    "huggingface_index",
    "is_hub_folder",
    "is_torch_file",
    "lay_out",
    "list_assets",
    "list_values",
    "load_from_huggingface",
    "make_state_dict",
    "name_for_trainer",
    "nest_stored",
    "own_process",
    "parse_casts",
    "parse_dtype",
    "parse_header",
    "parse_leave_out",
    "parse_options",
    "plain_name",
    "plan_export",
    "plan_tensors",
    "read_all_of_folder",
    "read_assets",
    "read_config",
    "read_hub_boxes",
    "read_hub_folder",
    "resolve_link",
    "review_folder",
    "review_others",
    "save_state_dict",
    "split_qkv",
    "split_vocabulary",
    "torch_save_to_dcp",
]

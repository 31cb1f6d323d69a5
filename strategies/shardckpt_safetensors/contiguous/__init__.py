"""Contiguous weights under their names of the Hub, by which a checkpoint is a Hugging Face folder, too."""

from shardckpt_safetensors.contiguous.options import ContiguousOptions, Layout, choose_assets, parse_patterns
from shardckpt_safetensors.contiguous.plan import ContiguousPlan, plan_contiguous
from shardckpt_safetensors.contiguous.stored import StoredFolder, encode_index
from shardckpt_safetensors.contiguous.work import ContiguousWork

__all__ = [
    "ContiguousOptions",
    "ContiguousPlan",
    "ContiguousWork",
    "Layout",
    "StoredFolder",
    "choose_assets",
    "encode_index",
    "parse_patterns",
    "plan_contiguous",
]

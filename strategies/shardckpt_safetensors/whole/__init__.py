"""Whole tensors: weights are contiguous, under their names of the Hub, and a checkpoint is a Hugging Face folder."""

from shardckpt_safetensors.whole.options import Layout, WholeOptions, choose_assets, parse_patterns
from shardckpt_safetensors.whole.plan import WholePlan, plan_whole
from shardckpt_safetensors.whole.stored import StoredFolder
from shardckpt_safetensors.whole.work import WholeWork

__all__ = [
    "Layout",
    "StoredFolder",
    "WholeOptions",
    "WholePlan",
    "WholeWork",
    "choose_assets",
    "parse_patterns",
    "plan_whole",
]

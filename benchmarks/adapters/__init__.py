"""Who is compared: one file an adapter."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.adapters.base import Adapter

#: Class by name, in the order of the table's columns.
ADAPTERS = {
    "shardckpt": "benchmarks.adapters.shardckpt:Shardckpt",
    "shardckpt-safetensors": "benchmarks.adapters.shardckpt:ShardckptSafetensors",
    "reference-buffered": "benchmarks.adapters.reference:Buffered",
    "reference-direct": "benchmarks.adapters.reference:Direct",
    "digested-reads": "benchmarks.adapters.reference:Digested",
    "dcp-1": "benchmarks.adapters.dcp:OneThread",
    "dcp-2": "benchmarks.adapters.dcp:TwoThreads",
    "megatron": "benchmarks.adapters.megatron:Megatron",
    "torch.save": "benchmarks.adapters.torch_save:TorchSave",
    "safetensors": "benchmarks.adapters.safetensors:Safetensors",
}
#: Names for several.
FAMILIES = {"reference": ("reference-buffered", "reference-direct"), "dcp": ("dcp-1", "dcp-2")}


def create(name: str) -> Adapter:
    """The adapter of a name, or of one's own: ``module:Class``."""
    module, _, attribute = ADAPTERS.get(name, name).partition(":")
    return getattr(importlib.import_module(module), attribute)()  # type: ignore[no-any-return]


__all__ = ["ADAPTERS", "FAMILIES", "create"]

"""The format (safetensors, 1): checkpoints without pickles, in files that every reader of safetensors opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt_safetensors.load import SafetensorsLoadShardedStrategy
    from shardckpt_safetensors.objects import register_codec
    from shardckpt_safetensors.save import SafetensorsSaveShardedStrategy

# lazy: a plugin's registration must not import torch
__getattr__ = lazy_getattr(
    __name__,
    {
        "load": ("SafetensorsLoadShardedStrategy",),
        "objects": ("register_codec",),
        "save": ("SafetensorsSaveShardedStrategy",),
    },
)

__all__ = ["SafetensorsLoadShardedStrategy", "SafetensorsSaveShardedStrategy", "register_codec"]

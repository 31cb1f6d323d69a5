"""The format (zarr, 1), which Megatron-Core wrote by default before 0.7 and on request up to 0.15. It is only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt_zarr.load import ZarrLoadShardedStrategy

# lazy: a plugin's registration must not import torch
__getattr__ = lazy_getattr(__name__, {"load": ("ZarrLoadShardedStrategy",)})

__all__ = ["ZarrLoadShardedStrategy"]

"""Read DeepSpeed's checkpoints, ZeRO and universal ones, without DeepSpeed and without running code in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.deepspeed.files import find_files
    from shardckpt.deepspeed.load import DeepSpeedLoadStrategy

# lazy: what says what a folder is must not import the archives, which unpickle
__getattr__ = lazy_getattr(__name__, {"files": ("find_files",), "load": ("DeepSpeedLoadStrategy",)})

__all__ = ["DeepSpeedLoadStrategy", "find_files"]

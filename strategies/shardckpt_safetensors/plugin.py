"""The entry point of the plugin. It registers (safetensors, 1) without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.plugins import hookimpl

if TYPE_CHECKING:
    from shardckpt.plugins import StrategyRegistry


@hookimpl
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Register the save and the load strategy."""
    registry.add_lazy(
        "safetensors",
        1,
        save="shardckpt_safetensors.save:SafetensorsSaveShardedStrategy",
        load="shardckpt_safetensors.load:SafetensorsLoadShardedStrategy",
        writes="safetensors files and an index of columns, without pickles",
        reads="its own files, and files of others by FORMAT.md",
        outline="shardckpt_safetensors.outline:read_outline",
    )

"""The entry point of the plugin. It registers the reader of (zarr, 1) without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.plugins import hookimpl

if TYPE_CHECKING:
    from shardckpt.plugins import StrategyRegistry


@hookimpl
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Register the load strategy."""
    registry.add_lazy(
        "zarr", 1, load="shardckpt_zarr.load:ZarrLoadShardedStrategy", reads="zarr folders of Megatron-Core 0.4 to 0.15"
    )

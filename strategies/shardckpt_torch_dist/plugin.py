"""The entry point of the plugin. It registers (torch_dist, 1) without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.plugins import hookimpl

if TYPE_CHECKING:
    from shardckpt.plugins import StrategyRegistry


@hookimpl
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Register the save and the load strategy, as the default of every save."""
    registry.add_lazy(
        "torch_dist",
        1,
        save="shardckpt_torch_dist.save:TorchDistSaveShardedStrategy",
        load="shardckpt_torch_dist.load:TorchDistLoadShardedStrategy",
        writes="files that Megatron-Core 0.9 to 0.20 and plain DCP read",
        reads="Megatron-Core 0.9 to 0.20 (flattened optimizer shards too), plain DCP directories",
        default=True,
        outline="shardckpt_torch_dist.outline:read_outline",
    )

"""The entry point: what shardckpt imports; torch and numpy wait until a checkpoint is saved or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import hookimpl

if TYPE_CHECKING:
    from shardckpt.plugins import StrategyRegistry


@hookimpl
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Add the pair of strategies."""
    registry.add_lazy(
        "npy",
        1,
        save="shardckpt_npy.save:NpySaveStrategy",
        load="shardckpt_npy.load:NpyLoadStrategy",
        writes="a .npy file for every shard, objects as JSON",
        reads="a .npy file for every shard, objects as JSON",
    )

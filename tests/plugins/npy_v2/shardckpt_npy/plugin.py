"""The entry point: what shardckpt imports; torch and numpy wait until a checkpoint is saved or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import hookimpl

if TYPE_CHECKING:
    from shardckpt.plugins import StrategyRegistry


@hookimpl
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Add the pair of strategies, and the way from version 1."""
    registry.add_lazy(
        "npy",
        2,
        save="shardckpt_npy.save:NpySaveStrategy",
        load="shardckpt_npy.load:NpyLoadStrategy",
        writes="a .npy file for every shard of any dtype, objects as JSON",
        reads="a .npy file for every shard of any dtype, objects as JSON",
    )
    registry.add_lazy_migration("npy", 1, 2, "shardckpt_npy.migration:AddDtypes")

"""The entry point: what shardckpt imports; torch and zarr wait until a checkpoint is saved or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import hookimpl

if TYPE_CHECKING:
    from shardckpt.plugins import StrategyRegistry


@hookimpl
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Add the pair of strategies."""
    registry.add_lazy(
        "zarr3",
        1,
        save="shardckpt_zarr3.save:Zarr3SaveStrategy",
        load="shardckpt_zarr3.load:Zarr3LoadStrategy",
        writes="a zarr v3 group, an array for every tensor",
        reads="a zarr v3 group, an array for every tensor",
    )

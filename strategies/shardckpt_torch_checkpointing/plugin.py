"""The entry point: registers the reader of (torch_checkpointing, 1) without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.plugins import hookimpl

if TYPE_CHECKING:
    from shardckpt.plugins import StrategyRegistry


@hookimpl
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Register the load strategy; there is none that saves."""
    registry.add_lazy(
        "torch_checkpointing",
        1,
        load="shardckpt_torch_checkpointing.load:TorchCheckpointingLoadStrategy",
        reads="directories of torch_checkpointing 0.1, at any number of ranks",
    )

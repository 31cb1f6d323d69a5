"""The entry point: registers (ep, 1) without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.plugins import hookimpl

if TYPE_CHECKING:
    from shardckpt.plugins import StrategyRegistry


@hookimpl
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Register the save and the load strategy."""
    registry.add_lazy(
        "ep",
        1,
        save="shardckpt_ep.save:EPSaveStrategy",
        load="shardckpt_ep.load:EPLoadStrategy",
        writes="expert parallelism: each tensor with all experts, ordered by number, in files that plain DCP reads",
        reads="files of (ep, 1) and (torch_dist, 1), at any size of expert parallelism",
    )

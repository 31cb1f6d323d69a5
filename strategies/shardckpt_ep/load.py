"""Loading (ep, 1), and (torch_dist, 1), whose bytes are the same, at any expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.mapping import ShardedTensor
from shardckpt_ep.experts import Experts
from shardckpt_ep.names import SECTIONS
from shardckpt_torch_dist import TorchDistLoadShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from shardckpt.mapping import ShardedBase
    from shardckpt.strategy import LoadContext
    from shardckpt_ep.layout import ExpertLayout


class EPLoadStrategy(TorchDistLoadShardedStrategy):
    """Reads tensors of experts into any layout; what (torch_dist, 1) and plain DCP wrote, too.

    Args:
        layouts: As for :class:`shardckpt_ep.EPSaveStrategy`.
        sections: What may stand before a parameter's name in a key.
    """

    backend = "ep"
    version = 1
    same_files = (("torch_dist", 1),)

    def __init__(
        self, layouts: Mapping[str, ExpertLayout] | None = None, *, sections: Iterable[str] = SECTIONS
    ) -> None:
        self._experts = Experts(layouts or {}, sections)

    def recognises(self, directory: Path) -> None:
        """Directories without ``metadata.json`` are (torch_dist, 1), as its own reader says."""

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Check the experts, then read as (torch_dist, 1) does."""
        with context.comm.collective_phase("comparing experts with their layouts"):
            for shard in wanted:
                if isinstance(shard, ShardedTensor):
                    self._experts.check_described(shard)
        return super().load(wanted, context)


__all__ = ["EPLoadStrategy"]

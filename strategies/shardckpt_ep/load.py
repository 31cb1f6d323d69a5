"""Load (ep, 1) and (torch_dist, 1), which have the same format, at any size of expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt_ep.names import SECTIONS
from shardckpt_torch_dist import TorchDistLoadShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from shardckpt.mapping import ShardedBase
    from shardckpt.strategy import LoadContext
    from shardckpt_ep.layout import ExpertLayout


class EPLoadStrategy(TorchDistLoadShardedStrategy):
    """Reads expert tensors into any layout, also from checkpoints of (torch_dist, 1) and plain DCP.

    Args:
        sections: Keys that may precede a parameter's name, such as ``model``.
    """

    backend = "ep"
    version = 1
    same_files = (("torch_dist", 1),)

    def __init__(
        self, layouts: Mapping[str, ExpertLayout] | None = None, *, sections: Iterable[str] = SECTIONS
    ) -> None:
        self._layouts, self._sections = dict(layouts or {}), tuple(sections)

    def recognises(self, directory: Path) -> None:
        """Recognise nothing: directories without ``metadata.json`` belong to the strategy of (torch_dist, 1)."""

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: check the experts against their layouts, then load as (torch_dist, 1) does."""
        # here: it imports DTensor, for half a second, and every reader is asked whether it recognises a directory
        from shardckpt_ep.experts import Experts

        Experts(self._layouts, self._sections).check_shards(wanted, context.comm)
        return super().load(wanted, context)

"""Saving as (ep, 1): what (torch_dist, 1) writes, with experts checked against their layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.mapping import ShardedTensor
from shardckpt_ep.experts import Experts
from shardckpt_ep.names import SECTIONS
from shardckpt_torch_dist import TorchDistSaveShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext, PreparedSave
    from shardckpt_ep.layout import ExpertLayout


class EPSaveStrategy(TorchDistSaveShardedStrategy):
    """Writes the files that (torch_dist, 1) and plain DCP read; tensors of experts hold all of them, in true order.

    Args:
        layouts: Layouts of this rank's expert parameters: shards that are described otherwise are refused. None
            where :func:`shardckpt_ep.expert_sharded_state_dict` has described them, or DTensors need no layouts.
        sections: What may stand before a parameter's name in a key.
        keep_only_main_replica: As for (torch_dist, 1), like all that follow.
        thread_count: Files a rank.
        cached_metadata: Without effect.
        separation_hint: Keys that begin with it go to files of their own.
    """

    backend = "ep"
    version = 1
    reader = "shardckpt 0.1, torch 2.6"
    caches_plan = True

    def __init__(
        self,
        layouts: Mapping[str, ExpertLayout] | None = None,
        *,
        sections: Iterable[str] = SECTIONS,
        keep_only_main_replica: bool = True,
        thread_count: int | None = None,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
    ) -> None:
        super().__init__(
            self.backend, self.version, keep_only_main_replica, thread_count, cached_metadata, separation_hint
        )
        self._sections = tuple(sections)
        self._experts = Experts(layouts or {}, self._sections)
        self._has_layouts = bool(layouts)

    @property
    def plan_cache_key(self) -> Hashable:
        """What (torch_dist, 1) plans by, and whose layouts the experts were compared with."""
        return super().plan_cache_key, self if self._has_layouts else self._sections

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Check the experts, then plan as (torch_dist, 1) does."""
        with context.comm.collective_phase("comparing experts with their layouts"):
            for shard in shards:
                if isinstance(shard, ShardedTensor):
                    self._experts.check_described(shard)
        return super().prepare(shards, common, context)


__all__ = ["EPSaveStrategy"]

"""Save as (ep, 1): the format of (torch_dist, 1), with experts checked against their layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt_ep.experts import Experts
from shardckpt_ep.names import SECTIONS
from shardckpt_torch_dist import TorchDistSaveShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import PlanContext, PreparedSave
    from shardckpt_ep.layout import ExpertLayout


class EPSaveStrategy(TorchDistSaveShardedStrategy):
    """Writes files that (torch_dist, 1) and plain DCP read. Each expert tensor holds all experts, ordered by number.

    Args:
        layouts: Layouts of this rank's expert parameters: shards that are described otherwise are an error. None where
            :func:`shardckpt_ep.expert_sharded_state_dict` has described them, or where DTensors need no layouts.
        sections: Keys that may precede a parameter's name, such as ``model``.
        thread_count: Number of files that each rank writes.
        separation_hint: Keys that begin with it go to separate files.
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
        """The key of (torch_dist, 1), and the layouts that the experts were checked against."""
        # A cached plan skips `prepare` and its check, so it must not serve a strategy with other layouts.
        return super().plan_cache_key, self if self._has_layouts else self._sections

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: check the experts against their layouts, then plan as (torch_dist, 1) does."""
        self._experts.check_shards(shards, context.comm)
        return super().prepare(shards, common, context)

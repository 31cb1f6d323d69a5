"""Fully parallel saves and loads: what several ranks hold or want is written, or read, by one of them."""

from __future__ import annotations

from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from shardckpt.parallel.plan_cache import PlanCache
from shardckpt.parallel.save import FullyParallelSaveStrategyWrapper, share_out

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper", "PlanCache", "share_out"]

"""The contract of a strategy, part by part."""

from shardckpt.testing.contract.rewriting import reseal
from shardckpt.testing.contract.strategy_contract import StrategyContract

__all__ = ["StrategyContract", "reseal"]

"""The contracts of a strategy, part by part, and of a store."""

from shardckpt.testing.contract.rewriting import reseal
from shardckpt.testing.contract.store_contract import StoreContract
from shardckpt.testing.contract.strategy_contract import StrategyContract

__all__ = ["StoreContract", "StrategyContract", "reseal"]

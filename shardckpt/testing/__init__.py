"""What authors of strategies run: a contract of tests, a pool of ranks, stores that fail, drawn state dicts.

``pip install 'shardckpt[testing]'`` installs pytest, hypothesis and fsspec, of which each is imported only where it is
used. shardckpt/testing/README.md shows a contract of a strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.testing.cases import SaveLoadCase, TensorCase, save_load_cases
    from shardckpt.testing.checks import check, check_same
    from shardckpt.testing.contract import StoreContract, StrategyContract, reseal
    from shardckpt.testing.faulty_store import FaultyFileSystem, FaultyStore
    from shardckpt.testing.rank_threads import RankThreads
    from shardckpt.testing.ranks import RankError, RankFailure, RankPool
    from shardckpt.testing.shard_specs import ShardSpec, layouts
    from shardckpt.testing.states import Destinations, make_state_dict
    from shardckpt.testing.tensors import TensorSpec, tensor_specs

# lazy: pytest imports the plugin in every project that has shardckpt installed
__getattr__ = lazy_getattr(
    __name__,
    {
        "cases": ("SaveLoadCase", "TensorCase", "save_load_cases"),
        "checks": ("check", "check_same"),
        "contract": ("StoreContract", "StrategyContract", "reseal"),
        "faulty_store": ("FaultyFileSystem", "FaultyStore"),
        "shard_specs": ("ShardSpec", "layouts"),
        "rank_threads": ("RankThreads",),
        "ranks": ("RankError", "RankFailure", "RankPool"),
        "states": ("Destinations", "make_state_dict"),
        "tensors": ("TensorSpec", "tensor_specs"),
    },
)

__all__ = [
    "Destinations",
    "FaultyFileSystem",
    "FaultyStore",
    "RankError",
    "RankFailure",
    "RankPool",
    "RankThreads",
    "SaveLoadCase",
    "ShardSpec",
    "StoreContract",
    "StrategyContract",
    "TensorCase",
    "TensorSpec",
    "check",
    "check_same",
    "layouts",
    "make_state_dict",
    "reseal",
    "save_load_cases",
    "tensor_specs",
]

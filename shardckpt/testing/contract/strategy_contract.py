"""The contract of a strategy: all parts in one class, which an author subclasses."""

from __future__ import annotations

from shardckpt.testing.contract.background import BackgroundTests
from shardckpt.testing.contract.damage import DamageTests
from shardckpt.testing.contract.files import FileTests
from shardckpt.testing.contract.gate import GateTests
from shardckpt.testing.contract.kills import KillTests
from shardckpt.testing.contract.loading import LoadingTests
from shardckpt.testing.contract.resharding import ReshardingTests
from shardckpt.testing.contract.state import StateTests
from shardckpt.testing.contract.stores import StoreTests
from shardckpt.testing.contract.values import ValueTests


class StrategyContract(
    ValueTests,
    StateTests,
    LoadingTests,
    FileTests,
    DamageTests,
    KillTests,
    GateTests,
    BackgroundTests,
    ReshardingTests,
    StoreTests,
):
    """The promises of every strategy, as tests: subclass it, name the strategies, claim their abilities.

    Each test says in a sentence which promise it keeps. A claim that is not made is a test that is skipped, with the
    claim's name. The strategies go to other processes: they are classes or functions at the top level of a module that
    can be imported from where pytest runs.

    Example:
        ::

            from shardckpt.testing import StrategyContract
            from shardckpt_npy.load import NpyLoadStrategy
            from shardckpt_npy.save import NpySaveStrategy

            class TestNpy(StrategyContract):
                save_strategy = NpySaveStrategy
                load_strategy = NpyLoadStrategy
                dtypes = (torch.float32, torch.int64, torch.bool)
                supports_python_values = False
    """

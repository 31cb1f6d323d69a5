"""The contract, run on the example that authors read; its slow parts are in the CI tier."""

from __future__ import annotations

from shardckpt_npy.load import NpyLoadStrategy
from shardckpt_npy.save import NpySaveStrategy

from shardckpt.testing import StrategyContract


class TestNpy(StrategyContract):
    """The example that authors read, (npy, 2): JSON for objects, no background saves, no answer to hostile files."""

    save_strategy = NpySaveStrategy
    load_strategy = NpyLoadStrategy
    supports_python_values = False
    supports_urls = True

"""The contract, run on the example that authors read and on the pickle-free format; slow parts are proof.

The CI tier has all of it on (torch_dist, 1).
"""

from __future__ import annotations

from shardckpt_npy.load import NpyLoadStrategy
from shardckpt_npy.save import NpySaveStrategy

from shardckpt.testing import StrategyContract
from tests.testing.claims import SafetensorsClaims


class TestNpy(StrategyContract):
    """The example that authors read, (npy, 2): JSON for objects, no background saves, no answer to hostile files."""

    save_strategy = NpySaveStrategy
    load_strategy = NpyLoadStrategy
    supports_python_values = False
    supports_urls = True


class TestSafetensors(SafetensorsClaims):
    """(safetensors, 1) keeps all that it claims."""

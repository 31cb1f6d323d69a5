"""The contract, run on strategies of all kinds: built in, a third party's, and one written for Megatron."""

from __future__ import annotations

import sys

import pytest
import torch
from shardckpt_npy.load import NpyLoadStrategy
from shardckpt_npy.save import NpySaveStrategy

from shardckpt.testing import StrategyContract
from tests.testing import path_strategies, zarr_strategies
from tests.testing.wrong_strategies import Contract


class TestTorchDist(StrategyContract):
    """(torch_dist, 1) makes every claim but a migration: there is no older version."""

    strategy = ("torch_dist", 1)
    supports_async = True
    supports_async_process = True
    supports_urls = True
    claims_safety = True
    removes_keys = True
    checks_files = True


class TestEP(TestTorchDist):
    """(ep, 1) makes the same claims."""

    strategy = "ep"


class TestNpy(StrategyContract):
    """The example that authors read, (npy, 2): JSON for objects, no background saves, no answer to hostile files."""

    save_strategy = NpySaveStrategy
    load_strategy = NpyLoadStrategy
    supports_python_values = False
    supports_urls = True


@pytest.mark.skipif(sys.version_info < (3, 11), reason="zarr 3 needs Python 3.11")
class TestZarr3(StrategyContract):
    """The second example, (zarr3, 1): a tree of folders, objects of any kind, no background saves."""

    save_strategy = zarr_strategies.make_saver
    load_strategy = zarr_strategies.make_loader
    supports_urls = True


class TestBlocks(Contract):
    """The strategy whose wrong versions show what the contract catches: it makes the claims that its files allow."""


class TestMegatronStyle(StrategyContract):
    """A strategy for Megatron's base classes, which get a path, through the adapter."""

    save_strategy = path_strategies.make_saver
    load_strategy = path_strategies.make_loader
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    names_oldest_reader = False  # Megatron's classes have no such attribute
    supports_flattened_range = False
    supports_shape_mismatch = False
    supports_async = True
    reads_only_requested = False

"""The contract, run on strategies of all kinds: built in, a third party's, and one written for Megatron."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from shardckpt.testing import StrategyContract
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.safetensors.parts import InParts
from tests.testing import path_strategies, zarr_strategies
from tests.testing.claims import SafetensorsClaims, TorchDistClaims
from tests.testing.wrong_strategies import Contract


class TestEP(TorchDistClaims):
    """(ep, 1) makes the same claims."""

    strategy = "ep"


class TestSafetensorsInParts(SafetensorsClaims):
    """The same claims hold where the index of every save is in parts."""

    save_strategy = InParts


class SaveWhole(SafetensorsSaveShardedStrategy):
    """Stores every tensor whole, in several files."""

    caches_plan = True

    def __init__(self, **options: Any) -> None:
        super().__init__(layout="contiguous", max_shard_size="1MB", **options)


class TestWhole(SafetensorsClaims):
    """All that (safetensors, 1) claims holds for whole tensors; dtypes are those that inference tools read."""

    save_strategy = SaveWhole
    dtypes = tuple(
        getattr(torch, name)
        for name in (
            *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
            *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        )
    )


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

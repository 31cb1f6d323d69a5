"""The contract of strategies, kept by checkpoints whose tensors are whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.testing import test_safetensors_contract as contracts  # the module: its tests would run here, too

pytestmark = pytest.mark.proof  # CI has the contract with boxes


class SaveWhole(SafetensorsSaveShardedStrategy):
    """Stores every tensor whole, in several files."""

    caches_plan = True

    def __init__(self, **options: Any) -> None:
        super().__init__(layout="whole", max_shard_size="1MB", **options)


class TestWhole(contracts.TestSafetensors):
    """All that (safetensors, 1) claims holds for whole tensors; dtypes are those that inference tools read."""

    save_strategy = SaveWhole
    dtypes = tuple(
        getattr(torch, name)
        for name in (
            *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
            *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        )
    )

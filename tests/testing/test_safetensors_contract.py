"""The contract, run on (safetensors, 1): a file of its own, that another worker runs beside ``test_contract.py``."""

from __future__ import annotations

import torch

from shardckpt.testing import StrategyContract
from tests.safetensors.parts import InParts

DTYPES_OF_SAFETENSORS = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        # and complex32, which torch warns of
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
)


class TestSafetensors(StrategyContract):
    """(safetensors, 1) makes every claim but two: it has no older version, and no class is stored without a codec."""

    strategy = "safetensors@1"
    dtypes = DTYPES_OF_SAFETENSORS
    supports_allowed_classes = False
    supports_async = True
    supports_async_process = True
    supports_urls = True
    claims_safety = True
    removes_keys = True
    checks_files = True


class TestSafetensorsInParts(TestSafetensors):
    """The same claims hold where the index of every save is in parts."""

    save_strategy = InParts

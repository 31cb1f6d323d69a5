"""What the built-in strategies claim under the contract of strategies."""

from __future__ import annotations

import torch

from shardckpt.testing import StrategyContract

DTYPES_OF_SAFETENSORS = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        # and complex32, which torch warns of
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
    if hasattr(torch, name)
)


class TorchDistClaims(StrategyContract):
    """(torch_dist, 1) makes every claim but a migration: there is no older version."""

    strategy = ("torch_dist", 1)
    supports_async = True
    supports_async_process = True
    supports_urls = True
    claims_safety = True
    removes_keys = True
    checks_files = True


class SafetensorsClaims(StrategyContract):
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

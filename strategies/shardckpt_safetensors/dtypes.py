"""The dtypes of the format, by the names that its index has for them."""

from __future__ import annotations

import torch

from shardckpt.errors import CheckpointingException, ShardingError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C32": torch.complex32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F4_E2M1_X2": torch.float4_e2m1fn_x2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: Bytes of an element, by the names that every release of safetensors opens. Older ones refuse a whole file whose
#: header has any other, so those are declared as U8.
HEADER_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


def dtype_name(key: str, dtype: torch.dtype) -> str:
    """Return the format's name of a tensor's dtype; raise ShardingError, with its key, if there is none."""
    if dtype not in _NAMES:
        raise ShardingError(
            f"tensor {key!r}: the format has no name for {dtype}: view it as torch.uint8, or save as torch_dist"
        )
    return _NAMES[dtype]


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name; raise CheckpointingException if this release does not know it."""
    if name not in _DTYPES:
        raise CheckpointingException(f"it has tensors of dtype {name!r:.100}, which this release does not know")
    return _DTYPES[name]


def declare(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return how the header of a data file declares values: dtype and shape; as bytes if it has no such dtype."""
    name = _NAMES[dtype]
    return (name, shape) if name in HEADER_BYTES else ("U8", (*shape, dtype.itemsize))


def header_name(dtype: torch.dtype) -> str:
    """Return how every release of safetensors names a dtype; ``""`` if some do not know it."""
    name = _NAMES.get(dtype, "")
    return name if name in HEADER_BYTES else ""

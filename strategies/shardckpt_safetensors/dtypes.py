"""The dtypes of the format, by the names that its index has for them."""

from __future__ import annotations

import torch

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.tensors import QUANTIZED_DTYPES
from shardckpt_safetensors.dtype_names import DTYPES, HEADER_BYTES

#: Those that this torch has.
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, known.torch_name) for name, known in DTYPES.items() if hasattr(torch, known.torch_name)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(key: str, dtype: torch.dtype) -> str:
    """Return the format's name of a tensor's dtype; raise ShardingError, with its key, if there is none."""
    if dtype not in _NAMES:
        advice = "save its int_repr(), scales and zero points"
        if dtype not in QUANTIZED_DTYPES:
            advice = "view it as torch.uint8, or save as torch_dist"
        raise ShardingError(f"tensor {key!r}: the format has no name for {dtype}: {advice}")
    return _NAMES[dtype]


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name; raise CheckpointingException if this release, or this torch, does not know it."""
    if name not in _DTYPES:
        raise CheckpointingException(
            f"it has tensors of dtype {name!r:.100}, which this release, or torch {torch.__version__}, lacks"
        )
    return _DTYPES[name]


def declare(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return how the header of a data file declares values: dtype and shape; as bytes if it has no such dtype."""
    name = _NAMES[dtype]
    return (name, shape) if name in HEADER_BYTES else ("U8", (*shape, dtype.itemsize))


def header_name(dtype: torch.dtype) -> str:
    """Return how every release of safetensors names a dtype; ``""`` if some do not know it."""
    name = _NAMES.get(dtype, "")
    return name if name in HEADER_BYTES else ""

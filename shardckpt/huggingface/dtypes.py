"""dtypes: their sizes, their names in safetensors files, and which of them can be cast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from shardckpt.errors import ConfigurationError, ask_nearest
from shardckpt.tensors.dtype_names import KNOWN_DTYPES

if TYPE_CHECKING:
    from shardckpt.planning.boxes import Ints

#: Those that safetensors and this torch have, by the names in safetensors files.
_DTYPES: dict[str, torch.dtype] = {
    known.safetensors_name: getattr(torch, known.torch_name)
    for known in KNOWN_DTYPES
    if known.safetensors_name and hasattr(torch, known.torch_name)
}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}
#: Names that trainers' options have.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
#: Packed: a byte has two values, which safetensors counts as two elements and torch as one.
_PAIRS = "F4"


def get_dtype_size(dtype: torch.dtype) -> int:
    """Return the bytes of one element; for packed dtypes (``float4_e2m1fn_x2``), an element is a byte of two values."""
    return dtype.itemsize


def parse_dtype(
    dtype: torch.dtype | str | None, argument: str = "dtype", *, bits: Literal[8, 16] = 16
) -> torch.dtype | None:
    """Return the dtype that floating-point tensors are cast to; None for None.

    It is given as a dtype or its name: ``bfloat16``, ``torch.bfloat16``, ``bf16``. ``argument`` is the caller's name of
    it, for the error. ``bits`` is the fewest that it may have: below 16, values cannot be cast without scales. Another
    dtype is a ConfigurationError.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not is_unpacked_float(found) or 8 * found.itemsize < bits:
        expected = "float64, float32, float16" + (", bfloat16 or an 8-bit float" if bits == 8 else " or bfloat16")  # noqa: PLR2004
        question = ask_nearest(name, ("bfloat16", "float16", "float32", "float64"))
        raise ConfigurationError(
            f"{argument}={dtype!r}: {question}expected {expected} (other tensors stay as they are)"
        )
    return found


def is_castable(dtype: torch.dtype) -> bool:
    """Return whether a cast applies: to floats of 16 bits or more; smaller ones mean nothing without their scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def is_unpacked_float(dtype: torch.dtype) -> bool:
    """Return whether every element is one floating-point number."""
    return dtype.is_floating_point and safetensors_name(dtype) != _PAIRS


def safetensors_name(dtype: torch.dtype) -> str | None:
    """Return the format's name of a dtype; None if the format cannot hold it."""
    return _NAME_OF.get(dtype)


def from_safetensors(name: str) -> torch.dtype | None:
    """Return the dtype of the format's name; None if this torch lacks it."""
    return _DTYPES.get(name)


def written_shape(name: str, shape: Ints) -> Ints:
    """Return the shape for a header, which counts values: two for each element of a packed dtype."""
    return (*shape[:-1], shape[-1] * 2) if name == _PAIRS else shape


def torch_shape(name: str, shape: Ints) -> Ints:
    """Return torch's shape for the shape in a header."""
    return (*shape[:-1], shape[-1] // 2) if name == _PAIRS and shape else shape

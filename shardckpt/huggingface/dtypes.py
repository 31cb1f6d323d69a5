"""torch's dtypes: their sizes, their names in safetensors files, and what a cast applies to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.errors import CheckpointingException, listed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.planning import Ints

#: Names that this torch may have or not, beside those that every torch has.
#: https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
}
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _NAMES.items() if hasattr(torch, attribute)
}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}
#: Two values a byte, which safetensors counts one by one and torch as one element.
_PAIRS = "F4"


def get_dtype_size(dtype: torch.dtype) -> int:
    """Bytes that an element of a tensor takes; of packed dtypes (``float4_e2m1fn_x2``) an element is a byte."""
    return dtype.itemsize


def parse_dtype(dtype: torch.dtype | str | None, argument: str = "dtype") -> torch.dtype | None:
    """The dtype that floating-point tensors are to be cast to; None for none.

    Args:
        dtype: A dtype of 16 bits or more, or its name: ``bfloat16``, ``torch.bfloat16``.
        argument: What the caller calls it, for the error.

    Raises:
        CheckpointingException: it is none, or not one that values can be cast to without scales.
    """
    if dtype is None:
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not is_castable(found):
        raise CheckpointingException(
            f"{argument}={dtype!r}: expected float64, float32, float16 or bfloat16 (other tensors stay as they are)"
        )
    return found


def is_castable(dtype: torch.dtype) -> bool:
    """Whether a cast applies to it: floats of 16 bits or more; smaller ones mean nothing without their scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def is_real(dtype: torch.dtype) -> bool:
    """Whether every element is a floating-point number: not two of them in a byte."""
    return dtype.is_floating_point and safetensors_name(dtype) != _PAIRS


def cast_to(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor has after the cast: its own where the cast does not apply."""
    return wanted if wanted is not None and is_castable(dtype) else dtype


def safetensors_name(dtype: torch.dtype) -> str | None:
    """What the format calls a dtype; None for one that it cannot hold."""
    return _NAME_OF.get(dtype)


def refuse_unknown(tensors: Iterable[tuple[str, torch.dtype]]) -> None:
    """Raise if safetensors files cannot hold some of the tensors, given as names and dtypes.

    Raises:
        CheckpointingException: names them.
    """
    refused = [f"{name!r} ({dtype})" for name, dtype in tensors if safetensors_name(dtype) is None]
    if refused:
        raise CheckpointingException(
            f"safetensors has no dtype for {listed(refused)}: write .bin files, which hold any, or leave these out"
        )


def from_safetensors(name: str) -> torch.dtype | None:
    """The dtype of the format's name; None where this torch has none."""
    return _DTYPES.get(name)


def written_shape(name: str, shape: Ints) -> Ints:
    """The shape as a header says it: of packed dtypes in values."""
    return (*shape[:-1], shape[-1] * 2) if name == _PAIRS else shape


def torch_shape(name: str, shape: Ints) -> Ints:
    """The shape that torch gives what a header says."""
    return (*shape[:-1], shape[-1] // 2) if name == _PAIRS and shape else shape


__all__ = [
    "cast_to",
    "from_safetensors",
    "get_dtype_size",
    "is_castable",
    "is_real",
    "parse_dtype",
    "refuse_unknown",
    "safetensors_name",
    "torch_shape",
    "written_shape",
]

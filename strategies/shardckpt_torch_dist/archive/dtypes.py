"""The storage classes that ``torch.save`` names in a pickle, and their dtypes."""

from __future__ import annotations

from typing import Literal

import torch

#: The dtypes that have a storage class. torch.save writes any other dtype as an UntypedStorage plus the dtype.
_STORAGE_NAMES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
}
_DTYPES = {name: dtype for dtype, name in _STORAGE_NAMES.items()}


def storage_class_name(dtype: torch.dtype) -> str | None:
    """Return the name of the dtype's storage class in the module ``torch``, or None if it has none."""
    return _STORAGE_NAMES.get(dtype)


def storage_class_dtype(module: str, name: str) -> torch.dtype | Literal[False] | None:
    """Return the dtype of a storage class that a pickle names: None for an untyped storage, False for no storage."""
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return None
    return _DTYPES.get(name, False) if module == "torch" else False


__all__ = ["storage_class_dtype", "storage_class_name"]

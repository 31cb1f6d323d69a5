"""dtypes and the names of the storage classes by which torch.save knows them."""

from __future__ import annotations

from typing import Literal

import torch

#: dtypes with a storage class of their own; tensors of any other dtype are pickled over bytes, with the dtype beside.
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


def storage_name(dtype: torch.dtype) -> str | None:
    """Name of the dtype's storage class in the module ``torch``, or None."""
    return _STORAGE_NAMES.get(dtype)


def storage_dtype(module: str, name: str) -> torch.dtype | Literal[False] | None:
    """The dtype of the storage class that a pickle names, None for a storage of bytes, False for any other global."""
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return None
    return _DTYPES.get(name, False) if module == "torch" else False


__all__ = ["storage_dtype", "storage_name"]

"""The storage classes that ``torch.save`` names in a pickle, and their dtypes."""

from __future__ import annotations

import torch

#: The name in the module ``torch`` of each dtype's storage class. torch.save writes any other dtype as an
#: UntypedStorage plus the dtype.
STORAGE_NAMES = {
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
#: The classes of storages that a pickle may name, with the dtype; None for an untyped storage.
STORAGE_DTYPES: dict[tuple[str, str], torch.dtype | None] = {
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): dtype for dtype, name in STORAGE_NAMES.items()},
}

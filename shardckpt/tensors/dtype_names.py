"""The dtypes that every format stores, as a table that is read without torch.

A new dtype is a row here. One that torch cannot copy stands in ``_BARE`` of :mod:`shardckpt.tensors.wrappers`, too.
"""

from __future__ import annotations

from typing import NamedTuple


class KnownDtype(NamedTuple):
    """A dtype of torch, which the installed release may lack.

    Attributes:
        torch_name: Its name in torch: ``"bfloat16"``.
        safetensors_name: Its name in the headers of safetensors files: ``"BF16"``; ``""`` if safetensors has none.
        itemsize: Bytes of an element, as torch counts elements: of ``float4_e2m1fn_x2`` a byte with two values.
    """

    torch_name: str
    safetensors_name: str
    itemsize: int


#: safetensors counts the values of a packed dtype, and torch the bytes that they are packed into.
#: https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs
KNOWN_DTYPES = (
    KnownDtype("bool", "BOOL", 1),
    KnownDtype("uint8", "U8", 1),
    KnownDtype("int8", "I8", 1),
    KnownDtype("float8_e4m3fn", "F8_E4M3", 1),
    KnownDtype("float8_e5m2", "F8_E5M2", 1),
    KnownDtype("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    KnownDtype("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    KnownDtype("float8_e8m0fnu", "F8_E8M0", 1),
    KnownDtype("float4_e2m1fn_x2", "F4", 1),
    KnownDtype("int16", "I16", 2),
    KnownDtype("uint16", "U16", 2),
    KnownDtype("float16", "F16", 2),
    KnownDtype("bfloat16", "BF16", 2),
    KnownDtype("int32", "I32", 4),
    KnownDtype("uint32", "U32", 4),
    KnownDtype("float32", "F32", 4),
    KnownDtype("complex32", "", 4),
    KnownDtype("int64", "I64", 8),
    KnownDtype("uint64", "U64", 8),
    KnownDtype("float64", "F64", 8),
    KnownDtype("complex64", "C64", 8),
    KnownDtype("complex128", "", 16),
)

"""The format's names of dtypes, without torch."""

from __future__ import annotations

from typing import NamedTuple


class KnownDtype(NamedTuple):
    """A dtype of the format: torch's name of it, and the bytes of an element."""

    torch_name: str
    itemsize: int


#: The dtypes by the names that the index has for them.
DTYPES = {
    "BOOL": KnownDtype("bool", 1),
    "U8": KnownDtype("uint8", 1),
    "I8": KnownDtype("int8", 1),
    "F8_E4M3": KnownDtype("float8_e4m3fn", 1),
    "F8_E5M2": KnownDtype("float8_e5m2", 1),
    "F8_E4M3FNUZ": KnownDtype("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": KnownDtype("float8_e5m2fnuz", 1),
    "F8_E8M0": KnownDtype("float8_e8m0fnu", 1),
    "I16": KnownDtype("int16", 2),
    "U16": KnownDtype("uint16", 2),
    "F16": KnownDtype("float16", 2),
    "BF16": KnownDtype("bfloat16", 2),
    "I32": KnownDtype("int32", 4),
    "U32": KnownDtype("uint32", 4),
    "F32": KnownDtype("float32", 4),
    "C32": KnownDtype("complex32", 4),
    "I64": KnownDtype("int64", 8),
    "U64": KnownDtype("uint64", 8),
    "F64": KnownDtype("float64", 8),
    "C64": KnownDtype("complex64", 8),
    "C128": KnownDtype("complex128", 16),
    "F4_E2M1_X2": KnownDtype("float4_e2m1fn_x2", 1),
}
#: Bytes of an element, by the names that every release of safetensors opens. Older ones refuse a whole file whose
#: header has any other, so those are declared as U8.
HEADER_BYTES = {
    name: DTYPES[name].itemsize
    for name in (
        *("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
        *("I16", "U16", "F16", "BF16"),
        *("I32", "U32", "F32"),
        *("I64", "U64", "F64"),
    )
}

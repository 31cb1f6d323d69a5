"""The format's names of dtypes, without torch."""

from __future__ import annotations

from shardckpt.tensors import KNOWN_DTYPES

#: Names of this format's own: safetensors has none, or counts the values of a packed dtype.
_OWN_NAMES = {"complex32": "C32", "complex128": "C128", "float4_e2m1fn_x2": "F4_E2M1_X2"}
#: The dtypes by the names that the index has for them.
DTYPES = {_OWN_NAMES.get(known.torch_name, known.safetensors_name): known for known in KNOWN_DTYPES}
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

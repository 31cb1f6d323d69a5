"""Values that need no walk: JSON's own, and, as objects with ``$``, the numbers and strings that JSON lacks."""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from typing import TYPE_CHECKING, Any

import torch

from shardckpt_safetensors.objects.json_text import show
from shardckpt_safetensors.objects.torch_tensors import dtype_name, find_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

#: The key that names the kind of an object of JSON, and the key of its value.
KIND, VALUE = "$", "v"
_INTEGER = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_OTHER_NAN = re.compile(r"[0-9a-f]{16}")
#: Integers that JSON holds; longer ones are hexadecimal, which takes linear time to read.
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_NAN = struct.pack(">d", math.nan)
#: Most axes of a torch.Size, and bits of its numbers.
_SIZE_BITS = 63


def tagged(kind: str, value: Any) -> dict[str, Any]:
    """Return the object of JSON that stands for a value."""
    return {KIND: kind, VALUE: value}


def has_surrogates(text: str) -> bool:
    """Return whether UTF-8 cannot hold a string."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def encode_str(value: str) -> Any:
    """Encode a string; one with surrogates as its code points."""
    return tagged("str", [ord(character) for character in value]) if has_surrogates(value) else value


def encode_int(value: int) -> Any:
    """Encode an integer of any size."""
    return value if _LEAST <= value <= _MOST else tagged("int", hex(value))


def encode_float(value: float) -> Any:
    """Encode a float; a NaN of other bits than Python's own as these bits."""
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return tagged("float", bits.hex() if value != value and bits != _NAN else str(value))  # noqa: PLR0124 - a NaN


def encode_complex(value: complex) -> Any:
    """Encode a complex number."""
    return tagged("complex", [encode_float(value.real), encode_float(value.imag)])


def encode_base64(value: bytes | bytearray) -> str:
    """Return bytes as base64."""
    return base64.b64encode(value).decode()


#: How values are encoded that have no parts, by class.
PLAIN: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: encode_str,
    int: encode_int,
    float: encode_float,
}
#: The same, of classes that are rarer.
LEAVES: dict[type, Callable[[Any], Any]] = {
    **PLAIN,
    complex: encode_complex,
    range: lambda value: tagged("range", [*map(encode_int, (value.start, value.stop, value.step))]),
    torch.Size: lambda value: tagged("size", list(value)),
    torch.dtype: lambda value: tagged("dtype", dtype_name(value)),
    torch.device: lambda value: tagged("device", str(value)),
}


def decode_plain(value: Any) -> Any:
    """Decode a value of JSON that is neither a list nor an object; ValueError for a string with surrogates."""
    if type(value) is str and has_surrogates(value):
        raise ValueError("a string with surrogates as it is")
    return value


def decode_base64(value: Any) -> bytes:
    """Return the bytes of base64."""
    if type(value) is not str or not value.isascii():
        raise ValueError(f"not base64: {show(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as exc:
        raise ValueError(f"not base64: {show(value)}: {exc}") from exc


def _decode_str(value: Any) -> str:
    if type(value) is not list or not all(type(point) is int and 0 <= point <= 0x10FFFF for point in value):  # noqa: PLR2004 - the last code point
        raise ValueError(f"not a list of code points: {show(value)}")
    return "".join(map(chr, value))


def _decode_int(value: Any) -> int:
    if type(value) is not str or not _INTEGER.fullmatch(value):
        raise ValueError(f"not a hexadecimal integer: {show(value)}")
    return int(value, 16)


def _decode_float(value: Any) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if type(value) is str and _OTHER_NAN.fullmatch(value):
        number: float = struct.unpack(">d", bytes.fromhex(value))[0]
        if math.isnan(number):
            return number
    raise ValueError(f"not a float that JSON lacks: {show(value)}")


def _decode_complex(value: Any) -> complex:
    return complex(*(_decode_part(part, float, "float") for part in list_of(value, 2)))


def _decode_range(value: Any) -> range:
    return range(*(_decode_part(part, int, "int") for part in list_of(value, 3)))  # ValueError for a step of 0


def _decode_part(value: Any, cls: type, kind: str) -> Any:
    """Return a number, which is one of JSON or an object of this kind."""
    if type(value) is dict and value.keys() == {KIND, VALUE} and value[KIND] == kind:
        return DECODERS[kind](value[VALUE])
    if type(value) is not cls:
        raise ValueError(f"not of type {kind}: {show(value)}")
    return value


def _decode_size(value: Any) -> torch.Size:
    if type(value) is not list or not all(type(n) is int and abs(n) < 1 << _SIZE_BITS for n in value):
        raise ValueError(f"not a list of sizes: {show(value)}")
    return torch.Size(value)


def _decode_device(value: Any) -> torch.device:
    if type(value) is not str:
        raise ValueError(f"not the name of a device: {show(value)}")
    try:
        return torch.device(value)
    except RuntimeError as exc:
        raise ValueError(f"not the name of a device: {show(value)}") from exc


def list_of(value: Any, length: int) -> list[Any]:
    """Return a list of JSON that must have so many items; ValueError if it has another number."""
    if type(value) is not list or len(value) != length:
        raise ValueError(f"not a list of {length}: {show(value)}")
    return value


#: How values without parts are decoded, by the kind under ``$``.
DECODERS: dict[str, Callable[[Any], Any]] = {
    "str": _decode_str,
    "int": _decode_int,
    "float": _decode_float,
    "complex": _decode_complex,
    "range": _decode_range,
    "size": _decode_size,
    "dtype": find_dtype,
    "device": _decode_device,
}

"""Arrays and scalars of numpy, which is imported only where a value is of numpy."""

from __future__ import annotations

import importlib
import math
import re
import sys
from typing import Any

from shardckpt.errors import CheckpointingException
from shardckpt_safetensors.objects.json_text import show
from shardckpt_safetensors.objects.tensor_file import FileTensor
from shardckpt_safetensors.objects.torch_tensors import referred_type

#: numpy's text of dtypes whose arrays are plain bytes: numbers, texts of fixed length, dates. Not objects, structures,
#: nor long doubles, whose bytes differ between machines.
_DTYPE = re.compile(
    r"\|b1|[|<>][iu]1|[<>](f2|[iuf][248]|c8|c16)|\|S[1-9][0-9]{0,8}|[<>]U[1-9][0-9]{0,8}"
    r"|[<>][mM]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
#: numpy's text of the dtypes in files; arrays of any other dtype are declared as U8, with this text in the tree.
_KINDS = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<u2": "U16",
    "<i2": "I16",
    "<f2": "F16",
    "<u4": "U32",
    "<i4": "I32",
    "<f4": "F32",
    "<u8": "U64",
    "<i8": "I64",
    "<f8": "F64",
}
_TEXTS = {kind: text for text, kind in _KINDS.items()}
_LAST_CODE_POINT = 0x10FFFF


def is_numpy(value: Any) -> bool:
    """Return whether a value is an array or a scalar of numpy, of any class."""
    numpy = sys.modules.get("numpy")  # a process that has not imported it has no value of it
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def is_scalar(value: Any) -> bool:
    """Return whether a value of numpy is a scalar, whose class may derive from float, complex, str or bytes."""
    return isinstance(value, sys.modules["numpy"].generic)


def encode_array(value: Any, name: str) -> tuple[FileTensor, Any]:
    """Return an array for a file, and how the tree refers to it; ValueError if it cannot be stored."""
    numpy = sys.modules["numpy"]
    text = value.dtype.str
    if type(value) is not numpy.ndarray:
        raise ValueError("is a subclass of an array: give numpy.array(it)")
    if not _DTYPE.fullmatch(text) or value.dtype.fields or value.dtype.subdtype:
        raise ValueError(
            f"of dtype {value.dtype}: give it as a list, as arrays of plain numbers, or, if it is bfloat16 or "
            "float8, as a torch tensor"
        )
    kind, data = _KINDS.get(text), value.tobytes()
    if kind is not None:
        return FileTensor(kind, value.shape, data), name
    return FileTensor("U8", [len(data)], data), {"name": name, "dtype": text, "shape": list(value.shape)}


def decode_array(reference: dict[str, Any], stored: FileTensor) -> Any:
    """Return an array of a file, with memory of its own.

    A malformed reference, or one that does not fit the tensor in the file, is a ValueError.
    """
    if not reference.keys() <= {"name", "dtype", "shape"}:
        raise ValueError(f"a malformed array: {sorted(reference)}")
    dtype, shape = referred_type(reference, stored)
    if dtype is None:
        dtype = _TEXTS.get(stored.kind)
    elif type(dtype) is str and dtype in _KINDS:
        raise ValueError(f"an array of {dtype} that is declared as U8")
    return _make(dtype, shape, stored.data)


def encode_scalar(value: Any) -> tuple[str, bytes]:
    """Return a scalar as the text of its dtype and its bytes; ValueError if it cannot be stored."""
    numpy = sys.modules["numpy"]
    text = value.dtype.str
    # numpy.longlong, say, would come back as numpy.int64
    if not _DTYPE.fullmatch(text) or text[1] in "SU" or numpy.dtype(text).type is not type(value):
        raise ValueError("is a scalar without a portable dtype: give it as a Python value (item(), str() or bytes())")
    return text, value.tobytes()


def decode_scalar(dtype: Any, data: bytes) -> Any:
    """Return a scalar of numpy by the text of its dtype and its bytes; a ValueError if they do not fit each other."""
    if type(dtype) is str and dtype[1:2] in ("S", "U"):
        raise ValueError(f"a scalar of {dtype:.40}")
    return _make(dtype, [], data)[()]


def _make(dtype: Any, shape: list[int], data: memoryview | bytes) -> Any:
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"a numpy dtype {show(dtype)}")
    try:
        numpy: Any = importlib.import_module("numpy")
    except ImportError as exc:
        raise CheckpointingException("values of numpy are in it: install numpy to load them") from exc
    try:
        made = numpy.dtype(dtype)
        if math.prod(shape) * made.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes for an array of {dtype} and shape {shape}")
        # copied: the bytes may be part of a larger payload, which the array would keep in memory
        array = numpy.empty(shape, made)
        array.reshape(-1).view(numpy.uint8)[:] = numpy.frombuffer(data, numpy.uint8)
        is_text = made.kind == "U" and array.size
        if is_text and int(array.reshape(-1).view(made.str[0] + "u4").max()) > _LAST_CODE_POINT:
            raise ValueError("text with numbers that are no characters")
    except (OverflowError, TypeError, MemoryError) as exc:
        raise ValueError(f"an array of {dtype} and shape {shape}: {exc}") from exc
    return array

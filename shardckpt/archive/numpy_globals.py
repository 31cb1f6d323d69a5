"""Checked replacements for the functions and classes that pickles of numpy arrays name.

Numpy's own are not safe: the constructors and ``__setstate__`` of its arrays and dtypes take pointers, flags and
offsets from a pickle unchecked. Here dtypes are made from names, and arrays from bytes whose length is checked.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

from shardckpt.archive.pickle_policy import FunctionProxy, OpaqueClass, PendingValue, describe
from shardckpt.errors import CorruptCheckpointError

_DTYPE_NAME = re.compile(r"([biufcSUV])(\d{1,9})|([O])\d?|([mM])8")
_TIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")
_MAX_DIMENSIONS = 32

#: In place of numpy.ndarray: a pickle may only name it as the type of an array.
NDARRAY = OpaqueClass("numpy.ndarray")


def numpy_global(module: str, name: str) -> Any:
    """Return the replacement for a numpy global, or None if it is not on the list."""
    if module == "numpy.dtypes" and name.endswith("DType"):
        return _find_dtype_class(name)
    if module.startswith("numpy._core."):  # numpy 2 renamed the package
        module = module.replace("_core", "core")
    return _GLOBALS.get((module, name))


def _import_numpy() -> Any:
    """Import numpy: only when a pickle names one of its dtypes or arrays."""
    return importlib.import_module("numpy")


def _make_error(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the pickle describes a numpy {what}: refused")


# ---- dtypes


def _find_dtype_class(name: str) -> Any:
    """Return a function that returns the dtype of a class such as ``Float64DType``, or None for any other name."""
    dtypes = {type(dtype).__name__: dtype for dtype in map(_import_numpy().dtype, "?bBhHiIlLqQefdgFDG")}
    return FunctionProxy(lambda: dtypes[name]) if name in dtypes else None


def _make_dtype(name: Any, _align: Any = False, _copy: Any = True) -> PendingValue:  # numpy's own positional flags
    """Replace ``numpy.dtype(name, False, True)``; the pickle sets its state (byte order, fields, unit) afterwards."""
    found = _DTYPE_NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise _make_error(f"dtype {describe(name)}")
    base = _import_numpy().dtype("O" if found[3] else name)
    return PendingValue(f"a numpy dtype {name}", lambda state: _apply_dtype_state(base, state))


def _apply_dtype_state(base: Any, state: Any) -> Any:
    """Return the dtype with the byte order, fields and unit of the state; alignment and flags are not copied."""
    if not isinstance(state, tuple) or len(state) not in (8, 9):
        raise _make_error("dtype with an unknown state")
    _, order, subarray, names, fields, itemsize = state[:6]
    if order not in ("<", ">", "=", "|"):
        raise _make_error(f"dtype of byte order {describe(order)}")
    if base.kind in "mM":
        base = _apply_unit(base, state)
    elif base.kind == "V" and names is not None:
        return _make_structured(base, names, fields, itemsize)
    elif base.kind == "V" and subarray is not None:
        return _make_subarray(base, subarray)
    return base if order == "|" else base.newbyteorder(order)


def _apply_unit(base: Any, state: tuple[Any, ...]) -> Any:
    unit, count = state[8][1][:2] if len(state) > 8 else ("generic", 1)  # noqa: PLR2004 - numpy's layout
    unit = unit.decode() if isinstance(unit, bytes) else unit
    if unit not in _TIME_UNITS or not isinstance(count, int) or not 0 < count < 1 << 31:
        raise _make_error(f"dtype of {describe(count)} {describe(unit)}")
    return base if unit == "generic" else _import_numpy().dtype(f"{base.kind}8[{count}{unit}]")


def _make_structured(base: Any, names: Any, fields: Any, itemsize: Any) -> Any:
    # after the dtype and the offset comes a title, if the field has one: another name of it
    parts = [(*fields[name], None)[:3] for name in names]
    if itemsize != base.itemsize or not all(isinstance(name, str) for name in names):
        raise _make_error(f"dtype of {describe(itemsize)} bytes with fields {describe(names)}")
    for dtype, offset, title in parts:
        if title is not None and type(title) is not str:
            raise _make_error(f"dtype with a field of the title {describe(title)}")
        if type(offset) is not int or offset < 0 or offset + _check_dtype(dtype).itemsize > itemsize:
            raise _make_error(f"dtype with a field at {describe(offset)}, outside its {itemsize} bytes")
    formats, offsets, titles = ([part[number] for part in parts] for number in range(3))
    described = {"names": list(names), "formats": formats, "offsets": offsets, "titles": titles, "itemsize": itemsize}
    return _import_numpy().dtype(described)


def _make_subarray(base: Any, subarray: Any) -> Any:
    element, shape = subarray
    shape = _check_shape((shape,) if isinstance(shape, int) else shape)
    if _check_dtype(element).itemsize * math.prod(shape) != base.itemsize:
        raise _make_error(f"dtype of {base.itemsize} bytes as {shape} of {element}")
    return _import_numpy().dtype((element, shape))


def _check_dtype(dtype: Any) -> Any:
    if not isinstance(dtype, _import_numpy().dtype):
        raise _make_error(f"dtype that is {describe(dtype)}")
    return dtype


# ---- arrays and scalars


def _reconstruct(kind: Any, _shape: Any, _code: Any) -> PendingValue:
    """Replace ``_reconstruct(ndarray, (0,), b"b")``; a subclass passes only if ``allow_globals`` has it."""
    if kind is NDARRAY:
        return PendingValue("a numpy array", _read_array_state)
    if not isinstance(kind, type) or not issubclass(kind, _import_numpy().ndarray):
        raise _make_error(f"array of class {describe(kind)}")
    return PendingValue(f"a {kind.__name__}", lambda state: _read_array_state(state).view(kind))


def _read_array_state(state: Any) -> Any:
    """Make an array from its pickled state: ([version,] shape, dtype, is Fortran order, bytes or list of objects)."""
    if not isinstance(state, tuple) or len(state) not in (4, 5):
        raise _make_error("array with an unknown state")
    shape, dtype, fortran, content = state[-4:]
    return _build_array(_check_shape(shape), _check_dtype(dtype), content, "F" if fortran else "C")


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any, axis_order: Any = None) -> Any:
    """Replace numpy's ``_frombuffer``, which protocol 5 calls to make arrays."""
    if not isinstance(content, (bytes, bytearray, memoryview)) or _check_dtype(dtype).hasobject:
        raise _make_error(f"array of {dtype} over a buffer")
    array = _build_array(_check_shape(shape), dtype, bytes(content), "F" if order == "F" else "C")
    return array.transpose(_check_shape(axis_order)) if order == "K" and axis_order is not None else array


def _build_array(shape: tuple[int, ...], dtype: Any, content: Any, order: Any) -> Any:
    numpy, count = _import_numpy(), math.prod(shape)
    if dtype.hasobject:
        return _build_object_array(shape, dtype, content, order)
    if isinstance(content, str):  # pickles of protocol 2 hold bytes as text
        content = content.encode("latin1")
    if not isinstance(content, (bytes, bytearray)) or len(content) != count * dtype.itemsize:
        raise _make_error(f"array of shape {shape} and {dtype} that does not have its {count * dtype.itemsize} bytes")
    if dtype.itemsize == 0 and count:
        raise _make_error(f"array of shape {shape} without bytes")
    flat = numpy.frombuffer(content, dtype).copy() if count else numpy.empty(0, dtype)
    return flat.reshape(shape, order=order)


def _build_object_array(shape: tuple[int, ...], dtype: Any, content: Any, order: Any) -> Any:
    if dtype != _import_numpy().dtype("O") or not isinstance(content, list) or len(content) != math.prod(shape):
        raise _make_error(f"array of shape {shape} and {dtype}, which is not a list of its objects")
    flat = _import_numpy().empty(len(content), dtype)
    for index, value in enumerate(content):
        flat[index] = value
    return _import_numpy().array(flat.reshape(shape), order=order)  # pickled in C order, whatever the order in memory


def _make_scalar(dtype: Any, content: Any = b"") -> Any:
    """Replace ``scalar(dtype, bytes)``, which pickles of numpy scalars call."""
    if _check_dtype(dtype).hasobject:
        raise _make_error(f"scalar of {dtype}")
    if dtype.itemsize == 0 and isinstance(content, (str, bytes, bytearray)) and not content:
        return _import_numpy().zeros(1, dtype)[0]
    return _build_array((1,), dtype, content, "C")[0]


def _check_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape as a tuple, if it has few axes and no negative size."""
    is_short = isinstance(shape, (tuple, list)) and len(shape) <= _MAX_DIMENSIONS
    if not is_short or not all(type(size) is int and size >= 0 for size in shape):
        raise _make_error(f"array of shape {describe(shape)}")
    return tuple(shape)


_GLOBALS = {
    ("numpy", "ndarray"): NDARRAY,
    ("numpy", "dtype"): FunctionProxy(_make_dtype, copies=True),
    ("numpy.core.multiarray", "_reconstruct"): FunctionProxy(_reconstruct, copies=True),
    ("numpy.core.multiarray", "scalar"): FunctionProxy(_make_scalar, copies=True),
    ("numpy.core.numeric", "_frombuffer"): FunctionProxy(_frombuffer, copies=True),
}


def count_copied_bytes(state: Any) -> int:
    """Return how many bytes or objects of a state BUILD would copy."""
    content = state[-1] if isinstance(state, tuple) and state else None
    return len(content) if isinstance(content, (bytes, bytearray, str, list)) else 0


def list_objects(state: Any) -> list[Any]:
    """Return the objects in the state of an array of dtype object; an empty list for any other state."""
    content = state[-1] if isinstance(state, tuple) and state else None
    return content if isinstance(content, list) else []

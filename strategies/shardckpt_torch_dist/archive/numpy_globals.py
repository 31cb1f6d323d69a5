"""Our own versions of the globals that numpy arrays are pickled with.

Numpy's own trust what they are given: its constructors and ``__setstate__`` of array and dtype take pointers, flags
and offsets from a pickle as they are. Here dtypes are made from names, and arrays from bytes whose length is checked.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

from shardckpt.errors import CorruptCheckpointError
from shardckpt_torch_dist.archive.pickle_policy import Marker, Unbuilt, brief, shielded

_MODULES = {
    "_reconstruct": ("numpy.core.multiarray", "numpy._core.multiarray"),
    "scalar": ("numpy.core.multiarray", "numpy._core.multiarray"),
    "_frombuffer": ("numpy.core.numeric", "numpy._core.numeric"),
    "ndarray": ("numpy",),
    "dtype": ("numpy",),
}
_PLAIN = re.compile(r"([biufcSUV])(\d{1,9})|([O])\d?|([mM])8")
_TIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")
_MAX_DIMENSIONS = 32

#: Stands for numpy.ndarray, which no pickle gets: it can only be named as the type of an array.
NDARRAY = Marker("numpy.ndarray")


def numpy_global(module: str, name: str) -> Any:
    """What a pickle gets for a numpy global, or None; numpy is imported only if a pickle names it."""
    if module == "numpy.dtypes" and name.endswith("DType"):
        return _dtype_class(name)
    if module not in _MODULES.get(name, ()):
        return None
    if name == "ndarray":
        return NDARRAY
    function: Any = {"dtype": _dtype, "_reconstruct": _reconstruct, "scalar": _scalar, "_frombuffer": _frombuffer}[name]
    return shielded(function, copies=True)


def _numpy() -> Any:
    return importlib.import_module("numpy")


def _bad(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the pickle describes a numpy {what}: refused")


# ---- dtypes


def _dtype_class(name: str) -> Any:
    """The class of one dtype without parameters, as something that gives this dtype."""
    dtypes = {type(dtype).__name__: dtype for dtype in map(_numpy().dtype, "?bBhHiIlLqQefdgFDG")}
    return shielded(lambda: dtypes[name]) if name in dtypes else None


def _dtype(name: Any, _align: Any = False, _copy: Any = True) -> Unbuilt:  # numpy's own positional flags
    """``numpy.dtype(name, False, True)``, whose state follows."""
    found = _PLAIN.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise _bad(f"dtype {brief(name)}")
    base = _numpy().dtype("O" if found[3] else name)
    return Unbuilt(f"a numpy dtype {name}", lambda state: _dtype_with(base, state))


def _dtype_with(base: Any, state: Any) -> Any:
    """The dtype with the byte order, fields and unit of its state; alignment and flags follow from these."""
    if not isinstance(state, tuple) or len(state) not in (8, 9):
        raise _bad("dtype with an unknown state")
    _, order, subarray, names, fields, itemsize = state[:6]
    if order not in ("<", ">", "=", "|"):
        raise _bad(f"dtype of byte order {brief(order)}")
    if base.kind in "mM":
        base = _with_unit(base, state)
    elif base.kind == "V" and names is not None:
        return _structured(base, names, fields, itemsize)
    elif base.kind == "V" and subarray is not None:
        return _subarray(base, subarray)
    return base if order == "|" else base.newbyteorder(order)


def _with_unit(base: Any, state: tuple[Any, ...]) -> Any:
    unit, count = state[8][1][:2] if len(state) > 8 else ("generic", 1)  # noqa: PLR2004 - numpy's layout
    unit = unit.decode() if isinstance(unit, bytes) else unit
    if unit not in _TIME_UNITS or not isinstance(count, int) or not 0 < count < 1 << 31:
        raise _bad(f"dtype of {brief(count)} {brief(unit)}")
    return base if unit == "generic" else _numpy().dtype(f"{base.kind}8[{count}{unit}]")


def _structured(base: Any, names: Any, fields: Any, itemsize: Any) -> Any:
    parts = [tuple(fields[name])[:2] for name in names]
    if itemsize != base.itemsize or not all(isinstance(name, str) for name in names):
        raise _bad(f"dtype of {brief(itemsize)} bytes with fields {brief(names)}")
    for dtype, offset in parts:
        if type(offset) is not int or offset < 0 or offset + _known(dtype).itemsize > itemsize:
            raise _bad(f"dtype with a field at {brief(offset)}, outside its {itemsize} bytes")
    formats, offsets = [dtype for dtype, _ in parts], [offset for _, offset in parts]
    return _numpy().dtype({"names": list(names), "formats": formats, "offsets": offsets, "itemsize": itemsize})


def _subarray(base: Any, subarray: Any) -> Any:
    element, shape = subarray
    shape = _checked_shape((shape,) if isinstance(shape, int) else shape)
    if _known(element).itemsize * math.prod(shape) != base.itemsize:
        raise _bad(f"dtype of {base.itemsize} bytes as {shape} of {element}")
    return _numpy().dtype((element, shape))


def _known(dtype: Any) -> Any:
    if not isinstance(dtype, _numpy().dtype):
        raise _bad(f"dtype that is {brief(dtype)}")
    return dtype


# ---- arrays and scalars


def _reconstruct(kind: Any, _shape: Any, _code: Any) -> Unbuilt:
    """``_reconstruct(ndarray, (0,), b"b")``, whose state follows; subclasses need the caller's leave."""
    if kind is NDARRAY:
        return Unbuilt("a numpy array", _array)
    if not isinstance(kind, type) or not issubclass(kind, _numpy().ndarray):
        raise _bad(f"array of class {brief(kind)}")
    return Unbuilt(f"a {kind.__name__}", lambda state: _array(state).view(kind))


def _array(state: Any) -> Any:
    """The array of a pickled state: (version,) shape, dtype, whether in Fortran's order, bytes or list of objects."""
    if not isinstance(state, tuple) or len(state) not in (4, 5):
        raise _bad("array with an unknown state")
    shape, dtype, fortran, content = state[-4:]
    return _filled(_checked_shape(shape), _known(dtype), content, "F" if fortran else "C")


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any, axis_order: Any = None) -> Any:
    """Numpy's ``_frombuffer``, by which protocol 5 makes arrays."""
    if not isinstance(content, (bytes, bytearray, memoryview)) or _known(dtype).hasobject:
        raise _bad(f"array of {dtype} over a buffer")
    array = _filled(_checked_shape(shape), dtype, bytes(content), "F" if order == "F" else "C")
    return array.transpose(_checked_shape(axis_order)) if order == "K" and axis_order is not None else array


def _filled(shape: tuple[int, ...], dtype: Any, content: Any, order: Any) -> Any:
    numpy, count = _numpy(), math.prod(shape)
    if dtype.hasobject:
        return _of_objects(shape, dtype, content, order)
    if isinstance(content, str):
        content = content.encode("latin1")
    if not isinstance(content, (bytes, bytearray)) or len(content) != count * dtype.itemsize:
        raise _bad(f"array of shape {shape} and {dtype} that does not have its {count * dtype.itemsize} bytes")
    if dtype.itemsize == 0 and count:
        raise _bad(f"array of shape {shape} without bytes")
    flat = numpy.frombuffer(content, dtype).copy() if count else numpy.empty(0, dtype)
    return flat.reshape(shape, order=order)


def _of_objects(shape: tuple[int, ...], dtype: Any, content: Any, order: Any) -> Any:
    if dtype != _numpy().dtype("O") or not isinstance(content, list) or len(content) != math.prod(shape):
        raise _bad(f"array of shape {shape} and {dtype}, which is not a list of its objects")
    flat = _numpy().empty(len(content), dtype)
    for index, value in enumerate(content):
        flat[index] = value
    return flat.reshape(shape, order=order)


def _scalar(dtype: Any, content: Any = b"") -> Any:
    """``scalar(dtype, bytes)``, by which numpy's scalars are pickled."""
    if _known(dtype).hasobject:
        raise _bad(f"scalar of {dtype}")
    if isinstance(content, str):
        content = content.encode("latin1")
    if dtype.itemsize == 0 and content == b"":
        return dtype.type()
    return _filled((1,), dtype, content, "C")[0]


def _checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape that is a short tuple of sizes."""
    short = isinstance(shape, (tuple, list)) and len(shape) <= _MAX_DIMENSIONS
    if not short or not all(type(size) is int and size >= 0 for size in shape):
        raise _bad(f"array of shape {brief(shape)}")
    return tuple(shape)


def copied_bytes(state: Any) -> int:
    """How much of a state building would copy."""
    content = state[-1] if isinstance(state, tuple) and state else None
    return len(content) if isinstance(content, (bytes, bytearray, str, list)) else 0


def objects_of(state: Any) -> list[Any]:
    """The objects of an array's state."""
    content = state[-1] if isinstance(state, tuple) and state else None
    return content if isinstance(content, list) else []


__all__ = ["NDARRAY", "copied_bytes", "numpy_global", "objects_of"]

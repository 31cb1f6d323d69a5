"""What lies in the directory: a zarr v3 group.

Each tensor is an array whose attributes have ``{"shardckpt": {"key", "dtype"}}``: the key, since the array's path may
be another name, and torch's dtype. What zarr has no dtype for (bfloat16, float8) is stored as unsigned integers of the
same size. The root's attributes have ``{"shardckpt": {"common", "objects"}}``. The root's ``zarr.json`` also has the
metadata of all arrays (zarr's consolidated metadata), so that one read tells what is stored. Chunks are not
compressed: what is stored is the memory's bytes.
"""

from __future__ import annotations

import base64
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zarr
from zarr.errors import ZarrUserWarning
from zarr.storage import MemoryStore

from shardckpt import decode_object, encode_object
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.tensors import plain_cpu, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.planning import Ints

ROOT = "zarr.json"
_SAME = {"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))}
_SAME |= {"float16", "float32", "float64", "complex64", "complex128"}


def new_group(attributes: dict[str, Any] | None = None) -> tuple[zarr.Group, dict[str, Any]]:
    """Return an empty group in memory, and the dict of its files: zarr makes the bytes, the writer stores them."""
    files: dict[str, Any] = {}
    return zarr.create_group(MemoryStore(files), zarr_format=3, attributes={"shardckpt": attributes or {}}), files


def add_array(group: zarr.Group, path: str, key: str, dtype: torch.dtype, shape: Ints, chunks: Ints) -> zarr.Array[Any]:
    """Create the array of a tensor."""
    return group.create_array(
        path,
        shape=shape,
        dtype=_stored_dtype(dtype),
        chunks=chunks,
        compressors=None,
        fill_value=0,
        attributes={"shardckpt": {"key": key, "dtype": str(dtype).removeprefix("torch.")}},
        config={"write_empty_chunks": True},  # a chunk of zeros that is not there would look like one that was lost
    )


def consolidate(group: zarr.Group) -> None:
    """Copy the metadata of all arrays into the root's file."""
    with warnings.catch_warnings():  # zarr says at each call that its specification has no such thing yet
        warnings.simplefilter("ignore", ZarrUserWarning)
        zarr.consolidate_metadata(group.store)


def to_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's values as zarr stores them."""
    plain = plain_cpu(tensor)
    return np.frombuffer(tensor_bytes(plain), _stored_dtype(plain.dtype)).reshape(plain.shape)


def to_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return stored values, one or more, as a tensor."""
    data = bytearray(array.tobytes())  # row by row
    return torch.frombuffer(data, dtype=dtype).view(array.shape)


def find_dtype(name: str, array: zarr.Array[Any]) -> torch.dtype:
    """Return the dtype of torch that an array's attributes name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"array {array.path!r} has a dtype {name!r} that this torch does not have")
    if array.dtype != _stored_dtype(dtype):
        raise CorruptCheckpointError(f"array {array.path!r} has {array.dtype} for {dtype}")
    return dtype


def pack(value: Any, what: str, allowed: Iterable[Any]) -> dict[str, Any]:
    """Return a value for the attributes: as JSON if that gives back the same, else pickled by the allow-list."""
    if _is_json(value):
        return {"json": value}
    return {"pickle": base64.b64encode(encode_object(value, what, allowed)).decode()}


def unpack(packed: dict[str, Any], what: str, allowed: Iterable[Any]) -> Any:
    """Return the value that :func:`pack` has packed."""
    if "json" in packed:
        return packed["json"]
    return decode_object(base64.b64decode(packed["pickle"]), what, allowed)


def _is_json(value: Any) -> bool:
    """Whether JSON gives back the value with its types: tuples, subclasses and keys that are no strings are lost."""
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


def _stored_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    if name not in _SAME and dtype.itemsize > 8:
        raise CheckpointingException(f"zarr has nothing for {dtype}: cast the tensor before it is saved")
    return np.dtype(name if name in _SAME else f"uint{8 * dtype.itemsize}")

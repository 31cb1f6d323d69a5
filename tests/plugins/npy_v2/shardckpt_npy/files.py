"""What lies in the directory: ``.npy`` files, ``index.json`` that names them, and ``common.json``.

The index is a list with an entry a stored shard: ``{"key", "dtype", "shape", "offset", "extent", "file"}`` for a
tensor's (the global shape, and the box that the file fills), ``{"key", "value"}`` for an object's. Version 1 had no
``dtype``: its reader opened data files to learn it, and what numpy has no dtype for (bfloat16, float8) could not be
stored. Such tensors are unsigned integers of the same size in their ``.npy`` files now.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.tensors import plain_cpu

if TYPE_CHECKING:
    from shardckpt.storage import CheckpointReader, CheckpointWriter

INDEX = "index.json"
COMMON = "common.json"
_STAND_INS = {1: torch.uint8, 2: torch.uint16}


def write_json(writer: CheckpointWriter, name: str, value: Any) -> None:
    """Write a value that JSON gives back as it is; tuples, sets and keys that are no strings are not such."""
    text = json.dumps(value, default=lambda _: None, skipkeys=True)
    if json.loads(text) != value:
        raise CheckpointingException(f"{name}: JSON would change {value!r:.200}: use lists, and strings as keys")
    writer.write(name, text.encode())


def read_json(reader: CheckpointReader, name: str) -> Any:
    """A JSON file's value."""
    return json.loads(reader.read(name))


def write_array(writer: CheckpointWriter, name: str, tensor: torch.Tensor) -> None:
    """Write a tensor as a ``.npy`` file."""
    plain = plain_cpu(tensor)
    try:
        array = plain.numpy()
    except TypeError:  # numpy has no such dtype
        array = plain.view(_STAND_INS[plain.dtype.itemsize]).numpy()
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    writer.write(name, file.getbuffer())


def read_array(reader: CheckpointReader, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A ``.npy`` file's tensor."""
    return read_plain(reader, name).view(dtype)


def read_plain(reader: CheckpointReader, name: str) -> torch.Tensor:
    """A ``.npy`` file's tensor in the dtype that numpy gives it."""
    return torch.from_numpy(np.load(io.BytesIO(reader.read(name)), allow_pickle=False))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as the index names it: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The dtype that the index names."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"{INDEX} names a dtype {name!r} that this torch does not have")
    return dtype

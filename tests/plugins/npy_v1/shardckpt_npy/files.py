"""What lies in the directory: ``.npy`` files, ``index.json`` that names them, and ``common.json``.

The index is a list with an entry a stored shard: ``{"key", "shape", "offset", "extent", "file"}`` for a tensor's (the
global shape, and the box that the file fills), ``{"key", "value"}`` for an object's.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.tensors import plain_cpu

if TYPE_CHECKING:
    from shardckpt.storage import CheckpointReader, CheckpointWriter

INDEX = "index.json"
COMMON = "common.json"


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
    try:
        array = plain_cpu(tensor).numpy()
    except TypeError as exc:
        raise CheckpointingException(f"numpy has no {tensor.dtype}: cast the tensor before it is saved") from exc
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    writer.write(name, file.getbuffer())


def read_array(reader: CheckpointReader, name: str) -> torch.Tensor:
    """A ``.npy`` file's tensor."""
    return torch.from_numpy(np.load(io.BytesIO(reader.read(name)), allow_pickle=False))

"""Read boxes of the tensors in an archive, whatever their strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.archive.checksums import summed
from shardckpt.archive.tensor_pickles import resolve_lazy_view
from shardckpt.storage.scatter import StoredArray, read_box
from shardckpt.tensors.wrappers import copy_values

if TYPE_CHECKING:
    from shardckpt.archive.payload import StoredPayload
    from shardckpt.planning.boxes import Ints
    from shardckpt.storage.reader import CheckpointReader


def read_payload(
    reader: CheckpointReader, file: str, stored: StoredPayload, start: Ints, target: torch.Tensor, key: str
) -> None:
    """Read the box of the target's shape that begins at ``start``, and cast it to the target's dtype.

    ``start`` is the index of the box's first element; the archive begins at the file's first byte. Of a tensor that is
    not contiguous, the part of its storage from the box's first element to its last is in memory.
    """
    if not target.numel():
        return
    itemsize = stored.dtype.itemsize
    if stored.is_contiguous:
        first = stored.offset + stored.first * itemsize
        with summed(reader, file, stored, target.numel() * itemsize, key) as source:
            read_box(source, StoredArray(file, first, stored.dtype, stored.shape), start, target, key)
        return
    first = stored.first + sum(index * step for index, step in zip(start, stored.stride, strict=True))
    last = first + sum((size - 1) * step for size, step in zip(target.shape, stored.stride, strict=True))
    memory = bytearray((last + 1 - first) * itemsize)
    with summed(reader, file, stored, len(memory), key) as source:
        source.read_into(file, stored.offset + first * itemsize, memoryview(memory), key)
    values = torch.frombuffer(memory, dtype=torch.uint8).view(stored.dtype)
    copy_values(target, resolve_lazy_view(values.as_strided(target.shape, stored.stride), stored.lazy))

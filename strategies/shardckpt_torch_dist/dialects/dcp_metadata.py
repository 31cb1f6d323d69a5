"""Descriptions of stored tensors in the classes of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from shardckpt.distributed import Comm  # noqa: F401 - DCP then keeps no process group: see tensors.torch_private

if TYPE_CHECKING:
    from collections.abc import Iterable


def to_dcp_tensor(
    dtype: torch.dtype, shape: Iterable[int], boxes: Iterable[tuple[Iterable[int], Iterable[int]]]
) -> TensorStorageMetadata:
    """Return a tensor in DCP's classes.

    Of the properties only the dtype is set: readers use no other, and torch has deprecated them.
    """
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(extent)) for offset, extent in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)

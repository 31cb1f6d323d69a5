"""What the tests of metadata pickle share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.torch_dist.indexes import tensors_of

if TYPE_CHECKING:
    from shardckpt_torch_dist.dialects.stored import StoredIndex


FILE = "__0_0.distcp"


def stock(index: StoredIndex, save_id: str) -> Metadata:
    """The same in DCP's own objects."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for key, tensor in tensors_of(index).items():
        boxes = [ChunkStorageMetadata(*map(torch.Size, chunk.box)) for chunk in tensor.chunks.values()]
        entries[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), boxes)
        places |= {MetadataIndex(key, offset): _StorageInfo(*chunk.item) for offset, chunk in tensor.chunks.items()}
    entries |= {key: BytesStorageMetadata() for key in index.objects}
    places |= {MetadataIndex(key): _StorageInfo(*item) for key, item in index.objects.items()}
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta(save_id=save_id))


def check_equal(found: Metadata, wanted: Metadata) -> None:
    """Equal, in the order of keys, and of the same types throughout."""
    assert found == wanted
    assert list(found.state_dict_metadata) == list(wanted.state_dict_metadata)
    assert all(type(key.offset) in (torch.Size, type(None)) and key.index is None for key in found.storage_data)

"""What a checkpoint stores, in one form for every dialect: tensors as boxes in true global coordinates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from shardckpt.planning.boxes import Box, Ints

#: The object by which Megatron from 0.19 on stores the common state among the tensors.
COMMON_KEY = "common_state/shard_0_1"
#: The file in which every other dialect has it.
COMMON_FILE = "common.pt"


class Item(NamedTuple):
    """A run of bytes in a file: one complete ``torch.save`` archive."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its elements are.

    Attributes:
        box: The box, in the tensor's true global coordinates.
        item: The archive that holds it.
        first: Index of the box's first element in the archive's tensor; they follow each other from there.
        volume: Number of elements of the archive's tensor.
    """

    box: Box
    item: Item
    first: int
    volume: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: its dtype, its true global shape, and the chunks that it is stored in."""

    dtype: torch.dtype
    shape: Ints
    chunks: dict[Ints, Chunk]


@dataclass(frozen=True)
class StoredIndex:
    """Everything that a checkpoint stores.

    Attributes:
        tensors: By key.
        objects: Megatron's sharded objects, by unique key.
        common: The common state, where it is stored as an object.
        loose: Values that plain DCP stored one by one, by their path in the saved state dict.
    """

    tensors: dict[str, StoredTensor]
    objects: dict[str, Item]
    common: Item | None = None
    loose: dict[tuple[Any, ...], Item] = field(default_factory=dict)

    def shards(self) -> list[ShardedBase]:
        """The tensors and objects as data-less descriptions of the whole."""
        found: list[ShardedBase] = []
        for key, tensor in self.tensors.items():
            zeros, ones = (0,) * len(tensor.shape), (1,) * len(tensor.shape)
            found.append(ShardedTensor(key, None, tensor.dtype, tensor.shape, tensor.shape, zeros, ones))
        return found + [ShardedObject.empty_from_unique_key(key) for key in self.objects]

    def metadata(self) -> Metadata:
        """The same as DCP's Metadata, for planners; where bytes are is not in it."""
        tensors: dict[str, Any] = {key: _dcp_tensor(tensor) for key, tensor in self.tensors.items()}
        return Metadata(state_dict_metadata={**tensors, **{key: BytesStorageMetadata() for key in self.objects}})


def object_key(key: str) -> str | None:
    """The unique key of one of Megatron's sharded objects as it is spelt today; None for any other key.

    Megatron 0.6 and 0.7 left the extents out of it.
    """
    try:
        return ShardedObject.empty_from_unique_key(key).unique_key
    except CheckpointingException:
        return None


def _dcp_tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.box.offset), torch.Size(chunk.box.shape))
        for chunk in tensor.chunks.values()
    ]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


__all__ = ["COMMON_FILE", "COMMON_KEY", "Chunk", "Item", "StoredIndex", "StoredTensor", "object_key"]

"""Objects that are put together from values and from entire tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.archive import read_payload
from shardckpt.chunks import ChunkRead, StoredChunk, read_chunks
from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.planning import Box
from shardckpt_torch_checkpointing.files import LocalTensor, join_path
from shardckpt_torch_checkpointing.index import Region
from shardckpt_torch_dist import NestedState

if TYPE_CHECKING:
    from shardckpt.mapping import ShardedObject
    from shardckpt.planning import Ints
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_checkpointing.files import Path
    from shardckpt_torch_checkpointing.index import Index, StoredTensor

#: Bytes that the tensors of an object may have, whatever the sizes of the files.
_FREE = 1 << 20


class _Tensor(NamedTuple):
    """A tensor of an object, and its regions in the files."""

    dtype: torch.dtype
    shape: Ints
    regions: list[Region]


def make_chunk(key: str, tensor: StoredTensor | _Tensor, region: Region) -> StoredChunk:
    """Return a region of a tensor as a chunk, which :func:`read_part` reads."""
    local = region.local
    return StoredChunk(key, tensor.dtype, tensor.shape, region.box, local.file, region, local.payload.offset)


def read_part(read: ChunkRead, reader: CheckpointReader) -> None:
    """Fill a tensor with all elements of a region."""
    region: Region = read.chunk.source
    read_payload(reader, region.local.file, region.local.payload, region.start, read.target, read.chunk.key)


def read_object(shard: ShardedObject, index: Index, reader: CheckpointReader) -> Any:
    """Return an object with its tensors; one of another number of ranks than saved is a ShardingError."""
    contents = index.per_rank.get(shard.key)
    if contents is None:
        nested, found = index.nested, _find_tensors(shard.key, index)
    elif tuple(shard.global_shape) == (len(contents),):
        nested, found = _find_content(contents[sorted(contents)[shard.global_offset[0]]])
    else:
        raise ShardingError(
            f"{shard.key!r} has an object for each of {len(contents)} ranks, and one of a grid of "
            f"{tuple(shard.global_shape)} is requested"
        )
    nbytes = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in found.values())
    if nbytes > _FREE + 2 * index.nbytes:  # they name the same bytes repeatedly
        raise CorruptCheckpointError(
            f"{shard.key!r} has tensors of {nbytes:,} bytes, and all files have {index.nbytes:,}"
        )
    values = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for key, tensor in found.items()}
    reads = [
        ChunkRead(
            make_chunk(key, tensor, region),
            (0,) * len(tensor.shape),
            values[key][region.box.within(Box.from_shape(tensor.shape))],
        )
        for key, tensor in found.items()
        for region in tensor.regions
    ]
    read_chunks(reads, lambda read: read_part(read, reader), reader)
    return nested.build(shard.key, values)


def _find_tensors(key: str, index: Index) -> dict[str, _Tensor]:
    """Return the tensors below a key; it is a CorruptCheckpointError if not all elements are stored."""
    found = {}
    for name in index.nested.tensors(key):
        tensor = index.tensors[name]
        whole = Box.from_shape(tensor.shape)
        index.check_stored(name, whole)
        found[name] = _Tensor(tensor.dtype, tensor.shape, index.find_regions(name, whole))
    return found


def _find_content(content: dict[Path, Any]) -> tuple[NestedState, dict[str, _Tensor]]:
    """Return an item of one rank, and its tensors, which are no parts of others."""
    found = {path: value for path, value in content.items() if isinstance(value, LocalTensor)}
    values = [path for path in content if path not in found]
    nested = NestedState(values, {join_path(path): path for path in found}, content.__getitem__)
    return nested, {
        join_path(path): _Tensor(
            local.dtype, local.shape, [Region(local, (0,) * len(local.shape), Box.from_shape(local.shape))]
        )
        for path, local in found.items()
    }

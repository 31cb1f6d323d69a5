"""A rank's reads of a stored expert tensor: DCP's read items, with destinations in this rank's tensor."""

from __future__ import annotations

import dataclasses
from operator import add
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardckpt.distributed import Comm  # noqa: F401 - DCP then keeps no process group: see tensors.torch_private
from shardckpt.errors import CorruptCheckpointError, ShapeMismatchError
from shardckpt.planning import Box, find_hole, find_overlap

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt_ep.layout import ExpertLayout


def get_stored_tensor(key: str, metadata: Metadata) -> TensorStorageMetadata:
    """Return the metadata of the tensor that is stored under a key; an object there is a ShapeMismatchError."""
    stored = metadata.state_dict_metadata[key]
    if not isinstance(stored, TensorStorageMetadata):
        raise ShapeMismatchError(f"{key!r}: an object is stored under the name of an expert tensor")
    return stored


def expert_read_items(key: str, layout: ExpertLayout, stored: TensorStorageMetadata) -> list[ReadItem]:
    """Return the read items that fill this rank's tensor from any number of stored chunks; none outside the mesh.

    Their destinations are offsets in the rank's own tensor, so that every DCP planner resolves them. If the tensor of
    all experts is stored in another shape, that is a ShapeMismatchError; if elements are missing or there twice, a
    CorruptCheckpointError.
    """
    if not layout.inside:
        return []
    if tuple(stored.size) != layout.global_shape:
        raise ShapeMismatchError(
            f"{key!r} is stored with shape {tuple(stored.size)}; its layout has {layout.num_experts} experts in "
            f"{layout.global_shape}"
        )
    pieces = layout.pieces()
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box, _ in pieces]
    planned: list[list[ReadItem]] = [[] for _ in pieces]
    for item in create_read_items_for_chunk_list(key, stored, chunks):
        planned[item.dest_index.index or 0].append(item)
    # planners know the rank's tensor by an offset of zeros
    whole = MetadataIndex(key, torch.Size((0,) * len(layout.global_shape)))
    found = []
    for (box, place), items in zip(pieces, planned, strict=True):
        filled = [Box(tuple(item.dest_offsets), tuple(item.lengths)) for item in items]
        if find_overlap(filled) is not None:
            raise CorruptCheckpointError(f"{key!r}: its stored chunks overlap in {box}")
        # DCP reads the chunks that exist and raises nothing: a hole would keep its old values
        hole = find_hole(box.shape, filled)
        if hole is not None:
            raise CorruptCheckpointError(f"{key!r}: the checkpoint does not hold {hole.moved(box.offset)} of it")
        for item in items:
            offsets = torch.Size(map(add, place, item.dest_offsets))  # in the rank's tensor, not in the box
            found.append(dataclasses.replace(item, dest_index=whole, dest_offsets=offsets))
    return found

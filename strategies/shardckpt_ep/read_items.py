"""What a rank reads of a stored expert tensor: DCP's read items, with destinations in this rank's tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import shardckpt.distributed  # noqa: F401 - so that what DCP imports keeps no process group: see shardckpt.tensors.torch_private
from shardckpt.errors import CorruptCheckpointError, ShapeMismatchError
from shardckpt.planning import Box, HeldBox, find_hole, find_overlap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt_ep.layout import ExpertLayout


def get_stored_tensor(key: str, metadata: Metadata) -> TensorStorageMetadata:
    """Return the metadata of a stored tensor.

    Args:
        key: A key that is stored.
        metadata: The checkpoint's.

    Raises:
        ShapeMismatchError: an object is stored under the key.
    """
    stored = metadata.state_dict_metadata[key]
    if not isinstance(stored, TensorStorageMetadata):
        raise ShapeMismatchError(f"{key!r}: an object is stored under the name of an expert tensor")
    return stored


def expert_read_items(key: str, layout: ExpertLayout, stored: TensorStorageMetadata) -> list[ReadItem]:
    """Create the read items that fill this rank's tensor from any number of stored chunks.

    Args:
        key: The key.
        layout: The layout of the rank's tensor.
        stored: The metadata of the stored tensor.

    Returns:
        The items, none outside the mesh. Their destinations are offsets in the rank's own tensor, so that every DCP
        planner resolves them.

    Raises:
        ShapeMismatchError: the tensor of all experts is stored in another shape.
        CorruptCheckpointError: the checkpoint lacks some of the elements, or has them twice.
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
    items = create_read_items_for_chunk_list(key, stored, chunks)
    for number, piece in enumerate(pieces):
        _check_filled(key, piece.box, [_destination(item) for item in items if item.dest_index.index == number])
    return [_to_local(item, pieces) for item in items]


def _to_local(item: ReadItem, pieces: Sequence[HeldBox]) -> ReadItem:
    """Return the item with offsets in the rank's tensor instead of in one of its boxes."""
    place = pieces[item.dest_index.index or 0].place
    offsets = torch.Size(start + step for start, step in zip(place, item.dest_offsets, strict=True))
    index = MetadataIndex(item.dest_index.fqn, torch.Size((0,) * len(place)))
    return dataclasses.replace(item, dest_index=index, dest_offsets=offsets)


def _destination(item: ReadItem) -> Box:
    """Return the part of its box that an item fills."""
    return Box(tuple(item.dest_offsets), tuple(item.lengths))


def _check_filled(key: str, wanted: Box, found: Iterable[Box]) -> None:
    """Raise if boxes overlap or leave a part of the wanted box, which would keep its old values."""
    boxes = list(found)
    if find_overlap(boxes) is not None:
        raise CorruptCheckpointError(f"{key!r}: its stored chunks overlap in {wanted}")
    hole = find_hole(wanted.shape, boxes)
    if hole is not None:
        raise CorruptCheckpointError(f"{key!r}: the checkpoint does not hold {hole.moved(wanted.offset)} of it")


__all__ = ["expert_read_items", "get_stored_tensor"]

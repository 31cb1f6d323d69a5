"""What a rank reads of a stored tensor of experts: DCP's arithmetic over this rank's boxes, turned to its tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import shardckpt.distributed  # noqa: F401 - so that what DCP imports keeps no process group: see shardckpt.tensors.torch_private
from shardckpt.errors import CorruptCheckpointError, ShapeMismatchError
from shardckpt.planning import Box, find_hole, find_overlap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt.planning import HeldBox
    from shardckpt_ep.layout import ExpertLayout


def stored_tensor(key: str, metadata: Metadata) -> TensorStorageMetadata:
    """What the checkpoint has of a tensor that it does have.

    Raises:
        ShapeMismatchError: what is stored is an object.
    """
    stored = metadata.state_dict_metadata[key]
    if not isinstance(stored, TensorStorageMetadata):
        raise ShapeMismatchError(f"{key!r}: an object is stored under the name of an expert tensor")
    return stored


def expert_read_items(key: str, layout: ExpertLayout, stored: TensorStorageMetadata) -> list[ReadItem]:
    """The items that fill this rank's tensor from however many stored chunks; none outside the mesh.

    Their destinations are counted in the rank's own tensor, so that every DCP planner resolves them.

    Args:
        key: The key.
        layout: Where the rank's tensor lies.
        stored: What the checkpoint has.

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
        _check_whole(key, piece.box, [_read(item) for item in items if item.dest_index.index == number])
    return [_in_local(item, pieces) for item in items]


def _in_local(item: ReadItem, pieces: Sequence[HeldBox]) -> ReadItem:
    """The item with its destination counted from the rank's tensor, not from one of its pieces."""
    place = pieces[item.dest_index.index or 0].place
    offsets = torch.Size(start + step for start, step in zip(place, item.dest_offsets, strict=True))
    index = MetadataIndex(item.dest_index.fqn, torch.Size((0,) * len(place)))
    return dataclasses.replace(item, dest_index=index, dest_offsets=offsets)


def _read(item: ReadItem) -> Box:
    """What an item fills of its piece."""
    return Box(tuple(item.dest_offsets), tuple(item.lengths))


def _check_whole(key: str, wanted: Box, found: Iterable[Box]) -> None:
    boxes = list(found)
    if find_overlap(boxes) is not None:
        raise CorruptCheckpointError(f"{key!r}: its stored chunks overlap in {wanted}")
    hole = find_hole(wanted.shape, boxes)
    if hole is not None:
        raise CorruptCheckpointError(f"{key!r}: the checkpoint does not hold {hole.moved(wanted.offset)} of it")


__all__ = ["expert_read_items", "stored_tensor"]

"""Make the index of all ranks' plans, on the main rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.chunks import Chunks, Item, merge_plans
from shardckpt_torch_dist.dialects import StoredIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.chunks import LocalPlan


def build_index(plans: Iterable[LocalPlan]) -> StoredIndex:
    """Merge the plans of all ranks, in their order, into one index.

    The plans' locations are number of the file, start and length in bytes. It is a ShardingError if ranks disagree on a
    tensor, its boxes do not fill it exactly, or an object has its key.
    """
    found = merge_plans(plans)
    file, start, length = found.locations.unbind(1)
    chunks = Chunks(found.boxes, file, start, length, torch.zeros_like(file), found.boxes.volume())
    objects = {key: Item(found.files[file], start, length) for key, (file, start, length) in found.objects.items()}
    return StoredIndex(found.keys, found.dtypes, found.shapes, found.bounds, chunks, found.files, objects)

"""Chunks of tensors in files, whatever the format: what a rank stores, what all store, and how to read it elsewhere.

A format says where an item lies in a file and what its bytes are; what is here is the same for all that store boxes.
"""

from shardckpt.chunks.append import append_tensor
from shardckpt.chunks.casts import check_cast
from shardckpt.chunks.coalesced_reads import SMALL_ITEM, ReadAhead, read_in_order, read_units
from shardckpt.chunks.files import count_files
from shardckpt.chunks.items import LocalItems, Source, collect_items, view_tensors
from shardckpt.chunks.merge import LocalPlan, MergedPlan, merge_plans
from shardckpt.chunks.parts import make_finder, match_parts
from shardckpt.chunks.regions import Region, StagedRegion
from shardckpt.chunks.requested import RequestedTensors
from shardckpt.chunks.staged import StagedDestination, check_no_partial_overlap, needs_staging
from shardckpt.chunks.stored import Chunk, ChunkIndex, Chunks, Item, StoredTensor

__all__ = [
    "SMALL_ITEM",
    "Chunk",
    "ChunkIndex",
    "Chunks",
    "Item",
    "LocalItems",
    "LocalPlan",
    "MergedPlan",
    "ReadAhead",
    "Region",
    "RequestedTensors",
    "Source",
    "StagedDestination",
    "StagedRegion",
    "StoredTensor",
    "append_tensor",
    "check_cast",
    "check_no_partial_overlap",
    "collect_items",
    "count_files",
    "make_finder",
    "match_parts",
    "merge_plans",
    "needs_staging",
    "read_in_order",
    "read_units",
    "view_tensors",
]

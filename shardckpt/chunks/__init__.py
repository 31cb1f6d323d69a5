"""Chunks of tensors in files, whatever the format: what a rank stores, what all store, and how to read it elsewhere.

A format says where an item lies in a file and what its bytes are; what is here is the same for all that store boxes.
"""

from shardckpt.chunks.append import append_run, append_tensor, cut_runs
from shardckpt.chunks.casts import check_cast
from shardckpt.chunks.coalesced_reads import ReadAhead, read_in_order, read_units
from shardckpt.chunks.entire import SMALL_ITEM, EntireChunks
from shardckpt.chunks.files import count_files
from shardckpt.chunks.items import LocalItems, Sources, collect_items, view_tensors
from shardckpt.chunks.merge import LocalPlan, MergedPlan, has_scales, merge_plans
from shardckpt.chunks.owners import OwnedParts, merge_by_owners
from shardckpt.chunks.parts import make_finder, match_parts
from shardckpt.chunks.regions import Region, StagedRegion
from shardckpt.chunks.requested import RequestedTensors
from shardckpt.chunks.save import ChunkSaveStrategy, ChunkWork, SavePlan
from shardckpt.chunks.staged import StagedDestination, check_no_partial_overlap, needs_staging
from shardckpt.chunks.stored import Chunk, ChunkIndex, Chunks, Item, StoredTensor
from shardckpt.chunks.ties import agree_on_aliases, find_ties

__all__ = [
    "SMALL_ITEM",
    "Chunk",
    "ChunkIndex",
    "ChunkSaveStrategy",
    "ChunkWork",
    "Chunks",
    "EntireChunks",
    "Item",
    "LocalItems",
    "LocalPlan",
    "MergedPlan",
    "OwnedParts",
    "ReadAhead",
    "Region",
    "RequestedTensors",
    "SavePlan",
    "Sources",
    "StagedDestination",
    "StagedRegion",
    "StoredTensor",
    "agree_on_aliases",
    "append_run",
    "append_tensor",
    "check_cast",
    "check_no_partial_overlap",
    "collect_items",
    "count_files",
    "cut_runs",
    "find_ties",
    "has_scales",
    "make_finder",
    "match_parts",
    "merge_by_owners",
    "merge_plans",
    "needs_staging",
    "read_in_order",
    "read_units",
    "view_tensors",
]

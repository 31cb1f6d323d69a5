"""Arithmetic of shards: boxes in global coordinates, and whether they cover what they should."""

from shardckpt.planning.balance import OBJECT_BYTES, deal, holders_by_shard
from shardckpt.planning.box_overlaps import Overlaps, overlaps, rows_of
from shardckpt.planning.boxes import Box, FlatPart, Ints, flat_parts, intersect, part_view, shard_parts, whole_box
from shardckpt.planning.coverage import Overlap, find_hole, find_overlap, find_uncovered
from shardckpt.planning.dtypes import Casts, casts_text, check_dtypes, is_exact, refuse_cast
from shardckpt.planning.lookup import BoxFinder
from shardckpt.planning.placements import Piece, Split, empty_box, local_shape, pieces
from shardckpt.planning.shapes import check_shapes
from shardckpt.planning.table import (
    LANES,
    PRIME,
    Boxes,
    Table,
    Whole,
    distinct,
    expected,
    fingerprint,
    integers,
    joined,
    matrix,
    misfits,
    numbered,
    same,
    spread,
    weigh,
)

__all__ = [
    "LANES",
    "OBJECT_BYTES",
    "PRIME",
    "Box",
    "BoxFinder",
    "Boxes",
    "Casts",
    "FlatPart",
    "Ints",
    "Overlap",
    "Overlaps",
    "Piece",
    "Split",
    "Table",
    "Whole",
    "casts_text",
    "check_dtypes",
    "check_shapes",
    "deal",
    "distinct",
    "empty_box",
    "expected",
    "find_hole",
    "find_overlap",
    "find_uncovered",
    "fingerprint",
    "flat_parts",
    "holders_by_shard",
    "integers",
    "intersect",
    "is_exact",
    "joined",
    "local_shape",
    "matrix",
    "misfits",
    "numbered",
    "overlaps",
    "part_view",
    "pieces",
    "refuse_cast",
    "rows_of",
    "same",
    "shard_parts",
    "spread",
    "weigh",
    "whole_box",
]

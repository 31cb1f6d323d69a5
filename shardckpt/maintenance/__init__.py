"""Verify, convert, merge, migrate and compare checkpoints, and remove keys: what the command does, as functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.maintenance.convert import ConversionReport, convert_checkpoint
    from shardckpt.maintenance.diff import DiffReport, TensorDifference, diff_checkpoints
    from shardckpt.maintenance.foreign import describe_folder, describe_foreign
    from shardckpt.maintenance.inside import (
        FILE_SUFFIXES,
        Names,
        is_marked,
        is_visible_in,
        list_inside,
        list_local_names,
        list_stored_names,
    )
    from shardckpt.maintenance.merge import MergeReport, merge_checkpoints
    from shardckpt.maintenance.merge_weights import WSM_DECAYS, compute_ema_weights, compute_wsm_weights
    from shardckpt.maintenance.migrate import migrate_checkpoint
    from shardckpt.maintenance.object_diff import ObjectDifference, ObjectReport
    from shardckpt.maintenance.proof import TensorProof
    from shardckpt.maintenance.remove import RemovalReport, remove_keys
    from shardckpt.maintenance.sources import open_any
    from shardckpt.maintenance.state_fingerprints import fingerprint
    from shardckpt.maintenance.statistics import Statistics, compute_statistics, has_numbers
    from shardckpt.maintenance.stored_fingerprints import fingerprint_checkpoint
    from shardckpt.maintenance.verify import (
        DAMAGED,
        INTACT,
        NO_ANSWER,
        FileResult,
        get_exit_code,
        has_digests,
        verify_checkpoint,
    )

# lazy: the face removes keys, and must not import the archives, which unpickle and which conversions read
__getattr__ = lazy_getattr(
    __name__,
    {
        "convert": ("ConversionReport", "convert_checkpoint"),
        "diff": ("DiffReport", "TensorDifference", "diff_checkpoints"),
        "foreign": ("describe_folder", "describe_foreign"),
        "inside": (
            "FILE_SUFFIXES",
            "Names",
            "is_marked",
            "is_visible_in",
            "list_inside",
            "list_local_names",
            "list_stored_names",
        ),
        "merge": ("MergeReport", "merge_checkpoints"),
        "merge_weights": ("WSM_DECAYS", "compute_ema_weights", "compute_wsm_weights"),
        "object_diff": ("ObjectDifference", "ObjectReport"),
        "migrate": ("migrate_checkpoint",),
        "proof": ("TensorProof",),
        "remove": ("RemovalReport", "remove_keys"),
        "sources": ("open_any",),
        "state_fingerprints": ("fingerprint",),
        "statistics": ("Statistics", "compute_statistics", "has_numbers"),
        "stored_fingerprints": ("fingerprint_checkpoint",),
        "verify": (
            "DAMAGED",
            "INTACT",
            "NO_ANSWER",
            "FileResult",
            "get_exit_code",
            "has_digests",
            "verify_checkpoint",
        ),
    },
)

__all__ = [
    "DAMAGED",
    "FILE_SUFFIXES",
    "INTACT",
    "NO_ANSWER",
    "WSM_DECAYS",
    "ConversionReport",
    "DiffReport",
    "FileResult",
    "MergeReport",
    "Names",
    "ObjectDifference",
    "ObjectReport",
    "RemovalReport",
    "Statistics",
    "TensorDifference",
    "TensorProof",
    "compute_ema_weights",
    "compute_statistics",
    "compute_wsm_weights",
    "convert_checkpoint",
    "describe_folder",
    "describe_foreign",
    "diff_checkpoints",
    "fingerprint",
    "fingerprint_checkpoint",
    "get_exit_code",
    "has_digests",
    "has_numbers",
    "is_marked",
    "is_visible_in",
    "list_inside",
    "list_local_names",
    "list_stored_names",
    "merge_checkpoints",
    "migrate_checkpoint",
    "open_any",
    "remove_keys",
    "verify_checkpoint",
]

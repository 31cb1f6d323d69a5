"""The engine: one save, from a state dict to a committed directory, and one load, back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.engine.amounts import format_bytes, format_seconds
    from shardckpt.engine.display import show_progress
    from shardckpt.engine.externally_coordinated import (
        ExternalSave,
        ExternalSavePart,
        locate_checkpoint,
        open_reader,
        report_read,
        write_part,
    )
    from shardckpt.engine.gc_pause import pause_gc
    from shardckpt.engine.integrity import (
        ExpectedFile,
        IncompleteFile,
        find_faults,
        find_incomplete_files,
        is_damage,
        list_digested_files,
        list_recorded_files,
        read_integrity,
        refuse_damage,
        save_integrity_manifest,
        verify_integrity,
        verify_integrity_manifest,
    )
    from shardckpt.engine.lazy import StoredCheckpoint, StoredTensor
    from shardckpt.engine.load_results import check_values
    from shardckpt.engine.load_template import MISSING, LoadTemplate
    from shardckpt.engine.loading import (
        LoadOptions,
        OpenCheckpoint,
        load_checkpoint,
        open_checkpoint,
        read_checkpoint,
    )
    from shardckpt.engine.locations import (
        check_names,
        expand_home,
        find_local,
        find_save_time,
        locate,
        locate_local,
        measure,
        measure_freed,
        name_library,
        refuse_overlap,
    )
    from shardckpt.engine.operation import Operation
    from shardckpt.engine.plan_cache import CachedPlan, PlanCache, saved_plans
    from shardckpt.engine.progress import Progress, wants_progress
    from shardckpt.engine.pruning import (
        PruneResult,
        clear_leftovers,
        clear_unfinished,
        clear_uploads,
        explain_kept_leftover,
        explain_unseen_uploads,
        make_superseded_check,
        open_staging,
        prune_leftovers,
        prune_spools,
    )
    from shardckpt.engine.renaming import find_usual_names, list_names, list_top_names, rename_stored
    from shardckpt.engine.saving import SaveOptions, check_state, find_saver, save_checkpoint
    from shardckpt.engine.streaming import (
        STREAM_BYTES,
        TensorBox,
        compute_fingerprints,
        make_destination,
        make_memory,
        read_boxes,
    )
    from shardckpt.engine.tensor_sums import TensorSums
    from shardckpt.engine.transaction import (
        INLINE_TABLES,
        CheckpointHeader,
        Transaction,
        WrittenFiles,
        as_json,
        commit_files,
    )
    from shardckpt.plugins import open_folder

__getattr__ = lazy_getattr(
    __name__,
    {
        "amounts": (
            "format_bytes",
            "format_seconds",
        ),
        "display": ("show_progress",),
        "externally_coordinated": (
            "ExternalSave",
            "ExternalSavePart",
            "locate_checkpoint",
            "open_reader",
            "report_read",
            "write_part",
        ),
        "gc_pause": ("pause_gc",),
        "integrity": (
            "ExpectedFile",
            "IncompleteFile",
            "find_faults",
            "find_incomplete_files",
            "is_damage",
            "list_digested_files",
            "list_recorded_files",
            "read_integrity",
            "refuse_damage",
            "save_integrity_manifest",
            "verify_integrity",
            "verify_integrity_manifest",
        ),
        "lazy": (
            "StoredCheckpoint",
            "StoredTensor",
        ),
        "load_results": ("check_values",),
        "load_template": (
            "MISSING",
            "LoadTemplate",
        ),
        "loading": (
            "LoadOptions",
            "OpenCheckpoint",
            "load_checkpoint",
            "open_checkpoint",
            "read_checkpoint",
        ),
        "renaming": (
            "find_usual_names",
            "list_names",
            "list_top_names",
            "rename_stored",
        ),
        "locations": (
            "check_names",
            "expand_home",
            "find_local",
            "find_save_time",
            "locate",
            "locate_local",
            "measure",
            "measure_freed",
            "measure_freed",
            "name_library",
            "open_folder",
            "refuse_overlap",
        ),
        "operation": ("Operation",),
        "plan_cache": (
            "CachedPlan",
            "PlanCache",
            "saved_plans",
        ),
        "progress": (
            "Progress",
            "wants_progress",
        ),
        "pruning": (
            "PruneResult",
            "clear_leftovers",
            "clear_unfinished",
            "clear_uploads",
            "explain_kept_leftover",
            "explain_unseen_uploads",
            "make_superseded_check",
            "open_staging",
            "prune_leftovers",
            "prune_spools",
        ),
        "saving": (
            "SaveOptions",
            "check_state",
            "find_saver",
            "save_checkpoint",
        ),
        "streaming": (
            "STREAM_BYTES",
            "TensorBox",
            "compute_fingerprints",
            "make_destination",
            "make_memory",
            "read_boxes",
        ),
        "tensor_sums": ("TensorSums",),
        "transaction": (
            "INLINE_TABLES",
            "CheckpointHeader",
            "Transaction",
            "WrittenFiles",
            "as_json",
            "commit_files",
        ),
    },
)

__all__ = [
    "INLINE_TABLES",
    "MISSING",
    "STREAM_BYTES",
    "CachedPlan",
    "CheckpointHeader",
    "ExpectedFile",
    "ExternalSave",
    "ExternalSavePart",
    "IncompleteFile",
    "LoadOptions",
    "LoadTemplate",
    "OpenCheckpoint",
    "Operation",
    "PlanCache",
    "Progress",
    "PruneResult",
    "SaveOptions",
    "StoredCheckpoint",
    "StoredTensor",
    "TensorBox",
    "TensorSums",
    "Transaction",
    "WrittenFiles",
    "as_json",
    "check_names",
    "check_state",
    "check_values",
    "clear_leftovers",
    "clear_unfinished",
    "clear_uploads",
    "commit_files",
    "compute_fingerprints",
    "expand_home",
    "explain_kept_leftover",
    "explain_unseen_uploads",
    "find_faults",
    "find_incomplete_files",
    "find_local",
    "find_save_time",
    "find_saver",
    "find_usual_names",
    "format_bytes",
    "format_seconds",
    "is_damage",
    "list_digested_files",
    "list_names",
    "list_recorded_files",
    "list_top_names",
    "load_checkpoint",
    "locate",
    "locate_checkpoint",
    "locate_local",
    "make_destination",
    "make_memory",
    "make_superseded_check",
    "measure",
    "measure_freed",
    "name_library",
    "open_checkpoint",
    "open_folder",
    "open_reader",
    "open_staging",
    "pause_gc",
    "prune_leftovers",
    "prune_spools",
    "read_boxes",
    "read_checkpoint",
    "read_integrity",
    "refuse_damage",
    "refuse_overlap",
    "rename_stored",
    "report_read",
    "save_checkpoint",
    "save_integrity_manifest",
    "saved_plans",
    "show_progress",
    "verify_integrity",
    "verify_integrity_manifest",
    "wants_progress",
    "write_part",
]

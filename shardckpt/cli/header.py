"""Describe a checkpoint as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.engine.lazy import StoredCheckpoint
    from shardckpt.manifest.plain import PlainRecord


def read_header(checkpoint: StoredCheckpoint | PlainRecord, place: Path) -> dict[str, Any]:
    """Return the known facts of the checkpoint as a whole; None for unknown ones."""
    from shardckpt.engine.locations import find_save_time, measure
    from shardckpt.manager.metrics import read_metrics
    from shardckpt.manifest.names import Rescue
    from shardckpt.manifest.plain import PlainRecord

    record = checkpoint if isinstance(checkpoint, PlainRecord) else checkpoint.record
    parent, step = checkpoint.lineage
    metrics: dict[str, float | None] = {} if record is None else read_metrics(record.content_metadata)
    if record is None and not isinstance(checkpoint, PlainRecord):
        from shardckpt.manager.trainer_steps import read_trainer_state

        step, metrics = read_trainer_state(place)
    rescue = (
        Rescue.from_content(checkpoint.content_metadata) if isinstance(checkpoint, PlainRecord) else checkpoint.rescue
    )
    return {
        "backend": checkpoint.backend,
        "version": checkpoint.version,
        "id": checkpoint.save_id or None,
        "parent": parent,
        "step": step,
        "metrics": metrics,
        "rescued": rescue.total,
        "rescued_keys": rescue.keys,
        "writer": None if record is None else record.writer,
        "library": _find_library(checkpoint, place),
        "ranks": None if record is None else record.world_size,
        "saved_at": find_save_time(place),
        "bytes_on_disk": measure(place),
    }


def _find_library(checkpoint: StoredCheckpoint | PlainRecord, place: Path) -> str | None:
    """Return the writer where no record names it: another library, or shardckpt, where the record was lost."""
    from shardckpt.engine.locations import name_library
    from shardckpt.manifest.names import RECORD_NAME
    from shardckpt.manifest.plain import PlainRecord

    if isinstance(checkpoint, PlainRecord) or checkpoint.record is not None:
        return None
    is_own = any(file.name == RECORD_NAME for file in checkpoint.find_incomplete_files())
    return "shardckpt" if is_own else checkpoint.library or name_library(place, checkpoint.backend)

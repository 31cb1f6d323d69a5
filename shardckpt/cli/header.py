"""What is known of a checkpoint as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.engine import StoredCheckpoint
    from shardckpt.manifest import Manifest


def read_header(checkpoint: StoredCheckpoint | Manifest, directory: str) -> dict[str, Any]:
    """Return what is known of the checkpoint as a whole; None for what is not."""
    from shardckpt.engine import find_save_time, locate, measure
    from shardckpt.plugins import get_plugin_manager

    place = locate(directory, get_plugin_manager())
    record, (parent, step) = checkpoint.record, checkpoint.lineage
    return {
        "backend": checkpoint.backend,
        "version": checkpoint.version,
        "id": checkpoint.save_id or None,
        "parent": parent,
        "step": step,
        "writer": None if record is None else record.writer,
        "ranks": None if record is None else record.world_size,
        "saved_at": find_save_time(place),
        "bytes_on_disk": measure(place),
    }

"""Fingerprints of the tensors of a stored checkpoint, computed from their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed.comm import Comm
from shardckpt.engine.lazy import StoredCheckpoint
from shardckpt.engine.loading import LoadOptions, read_checkpoint
from shardckpt.engine.streaming import STREAM_BYTES
from shardckpt.plugins.manager import get_plugin_manager

if TYPE_CHECKING:
    import os
    from collections.abc import Collection


def fingerprint_checkpoint(
    checkpoint_dir: str | os.PathLike[str], keys: Collection[str] | None = None, *, memory: int = STREAM_BYTES
) -> dict[str, str]:
    """Return a fingerprint of each tensor of a checkpoint, from its values, which are all read. Not collective.

    It is that of :func:`shardckpt.fingerprint`, 32 hex digits by the tensor's key, in the order of the keys: equal for
    equal values, whatever the sharding and the format. ``keys`` are by default all; a key that is not stored is an
    error. ``memory`` is bytes of values that are in memory at a time.
    """
    return read_checkpoint(
        checkpoint_dir,
        Comm(alone=True),
        get_plugin_manager(),
        LoadOptions(),
        lambda checkpoint: StoredCheckpoint(checkpoint).compute_fingerprints(keys, memory=memory),
    )

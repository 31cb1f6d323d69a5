"""What the tests of storage reader share."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as dcp

from shardckpt_torch_dist import CheckpointStorageReader


def load_by_reader(state: dict[str, Any], path: Any, planner: Any = None, **options: Any) -> dict[str, Any]:
    """Load through the storage reader."""
    dcp.load(state, storage_reader=CheckpointStorageReader(path, **options), planner=planner)
    return state

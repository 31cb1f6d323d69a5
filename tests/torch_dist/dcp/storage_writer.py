"""What the tests of storage writer share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlanner

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt_torch_dist import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
    ShardedLoadPlanner,
)
from tests.torch_dist import plain_states

if TYPE_CHECKING:
    from pathlib import Path


OLD, NEW = 1, 2


def save_by_writer(path: str, version: int = NEW, *, overwrite: bool = False, planner: Any = None) -> None:
    """Save a version of the sample through the storage writer."""
    writer = CheckpointStorageWriter(path, overwrite=overwrite)
    dcp.save(plain_states.state(version), storage_writer=writer, planner=planner)


def left_beside(path: Path) -> list[str]:
    """List what lies beside a checkpoint."""
    return [entry.name for entry in path.parent.iterdir() if entry.name != path.name]


# Who reads it.


def load_by_all(path: str) -> None:
    """Load by stock torch and by our reader."""
    plain_states.load(path, NEW)
    plain_states.load(path, NEW, CheckpointStorageReader)
    plain_states.load(path, NEW, CheckpointStorageReader, ShardedLoadPlanner())
    memory = plain_states.state(plain_states.BLANK)
    loaded = dc.load(to_sharded_state_dict(memory), path, strict="raise_all")
    plain_states.check(loaded, NEW)


def forget_plans() -> None:
    """Forget the plans that torch keeps."""
    for name in vars(SavePlanner):
        if name.startswith("_cached_"):
            getattr(SavePlanner, name).clear()

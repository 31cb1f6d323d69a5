"""The CheckpointManager of a training loop: when to save, what to load, which checkpoints to keep."""

from __future__ import annotations

from shardckpt.manager.cleanup import cleanup_old_checkpoints
from shardckpt.manager.config import AsyncMode, CheckpointConfig
from shardckpt.manager.manager import CheckpointManager
from shardckpt.manager.per_rank import PerRank, Stateful
from shardckpt.manager.replicas.fault_tolerance import FaultTolerance, ReplicaManager

__all__ = [
    "AsyncMode",
    "CheckpointConfig",
    "CheckpointManager",
    "FaultTolerance",
    "PerRank",
    "ReplicaManager",
    "Stateful",
    "cleanup_old_checkpoints",
]

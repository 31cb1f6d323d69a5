"""The CheckpointManager of a training loop: when to save, what to load, which checkpoints to keep."""

from shardckpt.manager.cleanup import cleanup_old_checkpoints
from shardckpt.manager.config import AsyncMode, CheckpointConfig
from shardckpt.manager.manager import CheckpointManager
from shardckpt.manager.per_rank import PerRank, Stateful
from shardckpt.manager.plain_state import describe_form, describe_tensors, merge_tensors, request_tensors
from shardckpt.manager.replicas import FaultTolerance, ReplicaManager
from shardckpt.manager.retention import KeepBest, KeepEvery, KeepLatest, KeepPinned, RetentionPolicy
from shardckpt.manager.rng import RandomState
from shardckpt.manager.states import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE
from shardckpt.manager.steps import CONTENT_KEY

__all__ = [
    "CONTENT_KEY",
    "DATALOADER",
    "LR_SCHEDULER",
    "MODEL",
    "OPTIMIZER",
    "TRAIN_STATE",
    "AsyncMode",
    "CheckpointConfig",
    "CheckpointManager",
    "FaultTolerance",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepPinned",
    "PerRank",
    "RandomState",
    "ReplicaManager",
    "RetentionPolicy",
    "Stateful",
    "cleanup_old_checkpoints",
    "describe_form",
    "describe_tensors",
    "merge_tensors",
    "request_tensors",
]

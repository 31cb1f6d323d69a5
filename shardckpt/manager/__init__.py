"""The CheckpointManager of a training loop: when to save, what to load, which checkpoints to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.manager.cleanup import cleanup_old_checkpoints
    from shardckpt.manager.config import AsyncMode, CheckpointConfig, Setting, find_faults, list_settings
    from shardckpt.manager.holds import Hold, Lease, find_holds, find_step, lease_step, pin_step, unpin_step
    from shardckpt.manager.listing import find_checkpoints, list_checkpoints
    from shardckpt.manager.manager import CheckpointManager
    from shardckpt.manager.marked_links import follow_marks
    from shardckpt.manager.marks import Mark, NotMarkedError, StepState, identify_save, mark_checkpoint
    from shardckpt.manager.metrics import CONTENT_KEY, rank_steps, read_metrics
    from shardckpt.manager.named_steps import find_named_step, refuse_named_step
    from shardckpt.manager.per_rank import PerRank, Stateful
    from shardckpt.manager.plain_state import describe_form, describe_tensors, merge_tensors, request_tensors
    from shardckpt.manager.replicas import FaultTolerance, ReplicaManager
    from shardckpt.manager.retention import (
        KeepBest,
        KeepEvery,
        KeepLatest,
        KeepNear,
        KeepPinned,
        KeepRecent,
        KeepVerified,
        Metrics,
        RetentionPolicy,
    )
    from shardckpt.manager.rng import RandomState
    from shardckpt.manager.save_policies import Moment, SaveAfter, SaveAt, SaveEvery, SavePolicy
    from shardckpt.manager.states import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE
    from shardckpt.manager.step_names import parse_step, split_path
    from shardckpt.manager.step_pruning import StepResult, prune_steps, remove_step
    from shardckpt.manager.summaries import CheckpointSummary, find_local_holds, list_once, list_plain
    from shardckpt.manager.titan import make_titan_config, merge_loader_states

__getattr__ = lazy_getattr(
    __name__,
    {
        "cleanup": ("cleanup_old_checkpoints",),
        "config": ("AsyncMode", "CheckpointConfig", "Setting", "find_faults", "list_settings"),
        "holds": ("Hold", "Lease", "find_holds", "find_step", "lease_step", "pin_step", "unpin_step"),
        "listing": ("find_checkpoints", "list_checkpoints"),
        "manager": ("CheckpointManager",),
        "marked_links": ("follow_marks",),
        "marks": ("Mark", "NotMarkedError", "StepState", "identify_save", "mark_checkpoint"),
        "metrics": ("CONTENT_KEY", "rank_steps", "read_metrics"),
        "named_steps": ("find_named_step", "refuse_named_step"),
        "per_rank": ("PerRank", "Stateful"),
        "plain_state": ("describe_form", "describe_tensors", "merge_tensors", "request_tensors"),
        "replicas": ("FaultTolerance", "ReplicaManager"),
        "retention": (
            "KeepBest",
            "KeepEvery",
            "KeepLatest",
            "KeepNear",
            "KeepPinned",
            "KeepRecent",
            "KeepVerified",
            "Metrics",
            "RetentionPolicy",
        ),
        "rng": ("RandomState",),
        "save_policies": ("Moment", "SaveAfter", "SaveAt", "SaveEvery", "SavePolicy"),
        "states": ("DATALOADER", "LR_SCHEDULER", "MODEL", "OPTIMIZER", "TRAIN_STATE"),
        "step_pruning": ("StepResult", "prune_steps", "remove_step"),
        "step_names": ("parse_step", "split_path"),
        "summaries": ("CheckpointSummary", "find_local_holds", "list_once", "list_plain"),
        "titan": ("make_titan_config", "merge_loader_states"),
    },
)

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
    "CheckpointSummary",
    "FaultTolerance",
    "Hold",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepNear",
    "KeepPinned",
    "KeepRecent",
    "KeepVerified",
    "Lease",
    "Mark",
    "Metrics",
    "Moment",
    "NotMarkedError",
    "PerRank",
    "RandomState",
    "ReplicaManager",
    "RetentionPolicy",
    "SaveAfter",
    "SaveAt",
    "SaveEvery",
    "SavePolicy",
    "Setting",
    "Stateful",
    "StepResult",
    "StepState",
    "cleanup_old_checkpoints",
    "describe_form",
    "describe_tensors",
    "find_checkpoints",
    "find_faults",
    "find_holds",
    "find_local_holds",
    "find_named_step",
    "find_step",
    "follow_marks",
    "identify_save",
    "lease_step",
    "list_checkpoints",
    "list_once",
    "list_plain",
    "list_settings",
    "make_titan_config",
    "mark_checkpoint",
    "merge_loader_states",
    "merge_tensors",
    "parse_step",
    "pin_step",
    "prune_steps",
    "rank_steps",
    "read_metrics",
    "refuse_named_step",
    "remove_step",
    "request_tensors",
    "split_path",
    "unpin_step",
]

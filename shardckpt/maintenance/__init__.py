"""Verifying, converting and migrating stored checkpoints, and removing keys: what the command does, as functions."""

from shardckpt.maintenance.convert import ConversionReport, convert_checkpoint
from shardckpt.maintenance.migrate import migrate_checkpoint
from shardckpt.maintenance.remove import RemovalReport, remove_keys
from shardckpt.maintenance.verify import DAMAGED, INTACT, NO_ANSWER, FileResult, get_exit_code, verify_checkpoint

__all__ = [
    "DAMAGED",
    "INTACT",
    "NO_ANSWER",
    "ConversionReport",
    "FileResult",
    "RemovalReport",
    "convert_checkpoint",
    "get_exit_code",
    "migrate_checkpoint",
    "remove_keys",
    "verify_checkpoint",
]

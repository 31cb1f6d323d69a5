"""What the command line does to checkpoints, without the command."""

from shardckpt.maintenance.migrate import migrate_checkpoint
from shardckpt.maintenance.remove import RemovalReport, remove_keys
from shardckpt.maintenance.verify import DAMAGED, NO_ANSWER, WHOLE, FileResult, verdict_of, verify_checkpoint

__all__ = [
    "DAMAGED",
    "NO_ANSWER",
    "WHOLE",
    "FileResult",
    "RemovalReport",
    "migrate_checkpoint",
    "remove_keys",
    "verdict_of",
    "verify_checkpoint",
]

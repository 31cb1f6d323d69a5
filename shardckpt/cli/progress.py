"""What long verbs show while they run."""

from shardckpt.engine import show_progress

__all__ = ["show_progress"]

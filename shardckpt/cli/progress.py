"""Show the progress of long verbs."""

from shardckpt.engine import show_progress

__all__ = ["show_progress"]

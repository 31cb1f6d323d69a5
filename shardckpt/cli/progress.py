"""Show the progress of long verbs."""

from shardckpt.engine.display import show_progress

__all__ = ["show_progress"]

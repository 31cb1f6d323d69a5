"""Bytes and times as people read them."""

from shardckpt.engine import format_bytes, format_seconds

__all__ = ["format_bytes", "format_seconds"]

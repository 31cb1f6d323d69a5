"""Bytes, counts, times and metrics as people read them."""

from __future__ import annotations

from shardckpt.engine.amounts import format_bytes, format_count, format_seconds
from shardckpt.errors import format_many


def format_metric(value: float | None) -> str:
    """Return a metric with six digits; None, which stands for NaN and infinity, is said."""
    return "not finite" if value is None else f"{value:.6g}"


__all__ = ["format_bytes", "format_count", "format_many", "format_metric", "format_seconds"]

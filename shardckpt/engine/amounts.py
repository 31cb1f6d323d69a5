"""Bytes, numbers of elements, and times as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")
_COUNTS = ("k", "M", "B", "T")
_THOUSAND = 1000
_TEN = 10
_TIMES = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"))


def format_bytes(nbytes: float) -> str:
    """Return a size with its unit, powers of 1000, as ``ls`` and ``--max-shard-size`` count: ``1.5 GB``."""
    return f"{nbytes:.0f} B" if nbytes < _THOUSAND else _scale(nbytes, _UNITS)


def format_count(count: int) -> str:
    """Return a number of elements as models are called by it: ``722 k``, ``1.2 B``."""
    return str(count) if count < _THOUSAND else _scale(count, _COUNTS)


def _scale(amount: float, units: Sequence[str]) -> str:
    value, unit = float(amount), ""
    for name in units:
        value, unit = value / _THOUSAND, name
        if round(value, 1) < _THOUSAND:
            break
    return f"{value:.1f} {unit}" if value < _TEN else f"{value:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration in its largest unit: ``5 min``."""
    for size, unit in _TIMES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_metric(value: float | None) -> str:
    """Return a metric with six digits; None stands for NaN and infinity."""
    return "not finite" if value is None else f"{value:.6g}"

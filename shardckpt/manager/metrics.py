"""Metrics of a step, as a checkpoint stores them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardckpt.errors import CheckpointingException


def as_numbers(metrics: Any) -> dict[str, float | None]:
    """The metrics by name as JSON has them: None for NaN and infinity.

    Raises:
        CheckpointingException: they are not given by name, or one is no number.
    """
    if not isinstance(metrics, Mapping):
        raise CheckpointingException(f"metrics={metrics!r:.100}: give them by name, {{'loss': 0.25}}")
    return {str(name): _number(str(name), value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise CheckpointingException(f"the metric {name!r} is {value!r:.100}: give one number") from exc
    return number if math.isfinite(number) else None


__all__ = ["as_numbers"]

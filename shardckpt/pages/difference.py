"""What a page shows of the difference of two checkpoints, as plain data in columns that JSON can say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardckpt.engine import is_optimizer_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.maintenance import DiffReport, TensorDifference


def describe_difference(
    report: DiffReport, first: Mapping[str, Any], second: Mapping[str, Any], options: str = ""
) -> dict[str, Any]:
    """Return the data of a page: both checkpoints, and columns of the tensors that differ, the worst first.

    The model comes before the optimizer. In each, what only one of them has, or has with another shape or dtype, comes
    before values that differ; of these, the one that changed most as a whole is first.

    Args:
        report: What differs.
        first: What :func:`describe_checkpoint` returned of the first checkpoint.
        second: The same of the second.
        options: How they were compared, as the caller said it.
    """
    rows = sorted(report.differences, key=_order)
    return {
        "sides": [first, second],
        "options": options,
        "equal": report.equal,
        "byFingerprint": report.by_fingerprint,
        "differences": {
            "key": [row.key for row in rows],
            "kind": [row.kind for row in rows],
            "first": [row.first for row in rows],
            "second": [row.second for row in rows],
            "elements": [row.elements for row in rows],
            "different": [row.different for row in rows],
            "absolute": [_number(row.max_absolute) for row in rows],
            "relative": [_number(row.max_relative) for row in rows],
            "norm": [_number(row.relative_norm) for row in rows],
            "index": [None if row.index is None else list(row.index) for row in rows],
        },
    }


def _order(row: TensorDifference) -> tuple[bool, bool, float, str]:
    norm = math.inf if row.relative_norm is None else row.relative_norm
    return is_optimizer_key(row.key), row.kind == "values", -norm, row.key


def _number(value: float | None) -> float | str | None:
    """Return a number as JSON has it: it has no infinity, and no NaN."""
    return value if value is None or math.isfinite(value) else "infinite"

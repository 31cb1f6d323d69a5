"""The data of a page on the difference of two checkpoints, in columns that JSON can say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardckpt.engine.optimizer_keys import is_optimizer_key
from shardckpt.pages.checkpoint import round_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.maintenance.diff_report import DiffReport, TensorDifference


#: Columns of tensors, which are equal in two steps of one job.
_COLUMNS = {"keys", "dtype", "shape", "nbytes", "dtypes", "shapes", "layouts", "layout"}


def describe_difference(
    report: DiffReport, first: Mapping[str, Any], second: Mapping[str, Any], options: str = ""
) -> dict[str, Any]:
    """Return the data of a page: both checkpoints, and columns of the tensors that differ, the worst first.

    The model comes before the optimizer. In each, tensors that only one of them has, or has with another shape or
    dtype, come before values that differ; of these, the one that changed most as a whole is first. A key of the first
    checkpoint is its number there; kinds and forms are numbers of texts that stand in the page once. ``options`` is how
    they were compared, as the caller said it.
    """
    rows = sorted(report.differences, key=_order)
    numbers = {key: number for number, key in enumerate(first["keys"])}
    kinds = _number(row.kind for row in rows)
    forms = _number(form for row in rows for form in (row.first, row.second))
    return {
        "sides": [first, _leave_out_same(second, first)],
        "options": options,
        "equal": report.equal,
        "byFingerprint": report.by_fingerprint,
        "differences": {
            "key": [numbers.get(row.key, row.key) for row in rows],
            "kind": [kinds[row.kind] for row in rows],
            "first": [forms[row.first] for row in rows],
            "second": [forms[row.second] for row in rows],
            "elements": [row.elements for row in rows],
            "different": [row.different for row in rows],
            "absolute": [round_number(row.max_absolute) for row in rows],
            "relative": [round_number(row.max_relative) for row in rows],
            "norm": [round_number(row.relative_norm) for row in rows],
            "index": [None if row.index is None else list(row.index) for row in rows],
            "kinds": list(kinds),
            "forms": list(forms),
        },
    }


def _number(texts: Iterable[str]) -> dict[str, int]:
    """Number texts that stand in many rows: a row has the number of its text."""
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


def _leave_out_same(second: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the second checkpoint, with None for each column of tensors that is the same in the first."""
    return {
        name: None if name in _COLUMNS and name in first and value == first[name] else value
        for name, value in second.items()
    }


def _order(row: TensorDifference) -> tuple[bool, bool, float, str]:
    norm = math.inf if row.relative_norm is None else row.relative_norm
    return is_optimizer_key(row.key), row.kind == "values", -norm, row.key

"""What a page has of the difference of two checkpoints."""

from __future__ import annotations

import json
import math

from shardckpt.maintenance import DiffReport, TensorDifference
from shardckpt.pages import describe_difference


def test_the_worst_difference_is_first() -> None:
    """What is absent comes before values, and larger relative differences before smaller; JSON can say all of it."""
    differences = tuple(
        TensorDifference(key, "values", "f", "f", 4, 1, 1.0, relative, (0,))
        for key, relative in (("small", 1e-6), ("nan", math.inf), ("large", 0.5))
    )
    report = DiffReport(7, 2, (*differences, TensorDifference("gone", "only in first", "f", "")))
    data = describe_difference(report, {"keys": []}, {"keys": []}, "--rtol 1e-9")
    assert data["differences"]["key"] == ["gone", "nan", "large", "small"]
    assert data["differences"]["relative"] == [None, "infinite", 0.5, 1e-6]
    assert (data["equal"], data["byFingerprint"], data["options"]) == (7, 2, "--rtol 1e-9")
    json.dumps(data, allow_nan=False)

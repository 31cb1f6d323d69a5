"""What a page has of the difference of two checkpoints."""

from __future__ import annotations

import json
import math

from shardckpt.maintenance import DiffReport, TensorDifference
from shardckpt.pages import describe_difference


def test_the_worst_difference_is_first() -> None:
    """What is absent comes before values, and what changed more before what changed less; JSON can say all of it."""
    differences = tuple(
        TensorDifference(key, "values", "f", "f", 4, 1, 1.0, 7.0, (0,), norm)
        for key, norm in (("small", 1e-6), ("nan", math.inf), ("large", 0.5))
    )
    report = DiffReport(7, 2, (*differences, TensorDifference("gone", "only in first", "f", "")))
    data = describe_difference(report, {"keys": []}, {"keys": []}, "--rtol 1e-9")
    assert data["differences"]["key"] == ["gone", "nan", "large", "small"]
    assert data["differences"]["norm"] == [None, "infinite", 0.5, 1e-6]
    assert (data["equal"], data["byFingerprint"], data["options"]) == (7, 2, "--rtol 1e-9")
    json.dumps(data, allow_nan=False)


def test_the_model_comes_before_the_optimizer() -> None:
    """What changed of the model is first, however much more the optimizer's state changed."""
    keys = ("optimizer.state.w.exp_avg", "model.w", "app.optim.state.w", "model.v")
    differences = [
        TensorDifference(key, "values", "f", "f", 4, 1, 1.0, 7.0, (0,), 1.0 / place)
        for place, key in enumerate(keys, 1)
    ]
    data = describe_difference(DiffReport(0, 0, tuple(differences)), {"keys": []}, {"keys": []})
    assert data["differences"]["key"] == ["model.w", "model.v", "optimizer.state.w.exp_avg", "app.optim.state.w"]

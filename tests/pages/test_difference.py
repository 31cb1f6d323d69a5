"""What a page has of the difference of two checkpoints."""

from __future__ import annotations

import json
import math

from shardckpt.maintenance import DiffReport, TensorDifference
from shardckpt.pages.checkpoint import describe_layouts, describe_tensors
from shardckpt.pages.difference import describe_difference
from shardckpt.pages.render import render_page
from shardckpt.strategy import StoredBox


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
    columns = data["differences"]
    assert [columns["kinds"][n] for n in columns["kind"]] == ["only in first", "values", "values", "values"]
    assert [columns["forms"][n] for n in columns["second"]] == ["", "f", "f", "f"]
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


def test_a_page_of_a_hundred_thousand_tensors_is_bounded() -> None:
    """A key, a form and a layout stand in the page once, also where all tensors of two steps differ."""
    keys = [f"model.decoder.layers.{n // 8}.experts.{n % 8}.weight" for n in range(100_000)]
    shape = (64, 32)
    tensors = describe_tensors((key, "bfloat16", shape, 2) for key in keys)
    side = {**tensors, **describe_layouts([StoredBox(key, (0, 0), shape, "f") for key in keys], keys, ["f"])}
    rows = [
        TensorDifference(key, "values", "bfloat16 [64, 32]", "bfloat16 [64, 32]", 2048, 7, 1 / n, 2 / n, (0, 0), 3 / n)
        for n, key in enumerate(keys, 1)
    ]
    page = render_page("c", side)
    both = render_page("d", describe_difference(DiffReport(0, 0, tuple(rows)), side, dict(side)))
    assert len(page) < 7_000_000
    assert len(both) < len(page) + 8_000_000
    assert both.count(keys[77_777]) == 1

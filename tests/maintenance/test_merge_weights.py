from __future__ import annotations

import math

import pytest

from shardckpt.errors import CheckpointingException
from shardckpt.maintenance import compute_ema_weights, compute_wsm_weights, merge_checkpoints
from tests.tables import table


def test_ema_weights_are_those_of_the_recurrence() -> None:
    """The weights give what the moving average gives, step by step."""
    values = [3.0, -1.0, 4.0, 1.5]
    average = values[0]
    for value in values[1:]:
        average = 0.9 * average + 0.1 * value
    weights = compute_ema_weights(4, 0.9)
    assert math.isclose(sum(w * v for w, v in zip(weights, values, strict=True)), average)
    assert math.isclose(sum(weights), 1)
    with pytest.raises(CheckpointingException, match="above 0 and below 1"):
        compute_ema_weights(3, 1.0)


@table("decay", ["linear", "cosine", "1-sqrt"])
def test_wsm_weights_stand_for_a_decay(decay: str) -> None:
    """The merge adds each update times the learning rate that the decay has there (arXiv:2507.17634, theorem 1)."""
    weights = compute_wsm_weights(range(5), decay)
    assert math.isclose(sum(weights), 1)
    rates = [sum(weights[number:]) for number in range(1, 5)]
    parts = [number / 5 for number in range(1, 5)]
    shape = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "1-sqrt": lambda x: 1 - math.sqrt(x),
    }[decay]
    assert rates == pytest.approx([shape(part) for part in parts])
    if decay == "linear":
        assert weights == pytest.approx([0.2] * 5)


def test_wsm_refuses_steps_that_do_not_ascend() -> None:
    """Sources in the wrong order, or without one, would be merged with the wrong weights."""
    for steps in ([100, 90], [1, 1, 2], [5], [1, float("nan"), 3], [1, float("inf")]):
        with pytest.raises(CheckpointingException, match="the oldest first"):
            compute_wsm_weights(steps)
    with pytest.raises(CheckpointingException, match="decays: 1-sqrt, cosine, linear"):
        compute_wsm_weights([1, 2], "square")


def test_weights_without_a_sum_are_refused() -> None:
    """Numbers whose sum no float holds, integers that no float holds, texts and None: the error says what to do."""
    for weights in ([1e308, 1e308], [10**400, 1], [float("nan"), 1.0], ["1", "2"], [None, 1.0]):
        with pytest.raises(CheckpointingException, match="Only their ratios count: divide all by the largest"):
            merge_checkpoints(["a", "b"], "c", weights=weights)  # type: ignore[arg-type]

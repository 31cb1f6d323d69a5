from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import CheckpointingException
from shardckpt.manager.retention import Retention

STEPS = st.lists(st.integers(0, 200), unique=True, max_size=20)
METRIC = st.one_of(st.none(), st.just(math.nan), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=2))
CHECKPOINTS = STEPS.flatmap(
    lambda steps: st.tuples(
        *(st.tuples(st.just(step), st.fixed_dictionaries({}, optional={"loss": METRIC})) for step in steps)
    )
)
RETENTIONS = st.builds(
    Retention,
    keep_latest_k=st.integers(0, 6),
    keep_every_n_steps=st.integers(0, 20),
    keep_best_k=st.integers(0, 4),
    best_metric=st.just("loss"),
    best_mode=st.sampled_from(["min", "max"]),
)


def _without_metrics(*steps: int) -> list[tuple[int, dict[str, Any]]]:
    return [(step, {}) for step in steps]


@given(CHECKPOINTS, RETENTIONS, st.sets(st.integers(0, 200), max_size=4))
def test_every_rule_keeps_what_it_promises(
    checkpoints: tuple[tuple[int, dict[str, Any]], ...], retention: Retention, protected: set[int]
) -> None:
    """The latest k, every n-th, the best k and the protected are kept; all else goes, if anything does."""
    removed = retention.to_remove(checkpoints, protected)
    steps = sorted(step for step, _ in checkpoints)
    assert removed == sorted(set(removed) & set(steps))
    if retention.keep_latest_k == 0:
        assert not removed
        return
    kept = set(steps) - set(removed)
    latest = set(steps[-retention.keep_latest_k :])
    nth = {step for step in steps if retention.keep_every_n_steps and step % retention.keep_every_n_steps == 0}
    others = kept - latest - nth - protected
    assert latest | nth | (protected & set(steps)) <= kept
    assert len(others) <= retention.keep_best_k
    values = {step: metrics.get("loss") for step, metrics in checkpoints}
    numbers = {step: value for step, value in values.items() if isinstance(value, int | float)}
    numbers = {step: value for step, value in numbers.items() if not math.isnan(value)}
    assert others <= numbers.keys()
    sign = 1 if retention.best_mode == "max" else -1
    best = sorted(numbers, key=lambda step: (sign * numbers[step], step))[-retention.keep_best_k or len(numbers) :]
    assert set(best) <= kept


@given(STEPS, st.integers(1, 5), st.randoms())
def test_the_newest_is_never_removed(steps: list[int], k: int, shuffle: Any) -> None:
    """In whatever order they are listed, the highest step stays."""
    listed = list(steps)
    shuffle.shuffle(listed)
    removed = Retention(k).to_remove(_without_metrics(*listed))
    assert max(steps, default=None) not in removed
    assert len(removed) == max(0, len(steps) - k)


def test_numbers_are_compared_and_not_names() -> None:
    """Step 1000 is newer than step 999."""
    assert Retention(2).to_remove(_without_metrics(1000, 20, 999)) == [20]


def test_zero_keeps_all() -> None:
    """``keep_latest_k=0`` keeps all checkpoints, whatever else is asked for."""
    retention = Retention(0, keep_every_n_steps=7, keep_best_k=1, best_metric="loss")
    assert retention.to_remove(_without_metrics(1, 2, 3)) == []


@pytest.mark.parametrize(("mode", "kept"), [("min", {4, 9}), ("max", {5, 9})])
def test_of_equals_the_newer_is_the_best(mode: Any, kept: set[int]) -> None:
    """Ties go to the newer; who has no number, or NaN, is never the best."""
    losses: dict[int, Any] = {1: 0.5, 2: math.nan, 3: None, 4: 0.5, 5: 0.9, 6: "0.1", 7: True, 9: 0.7}
    checkpoints = [(step, {} if loss is None else {"loss": loss}) for step, loss in losses.items()]
    removed = Retention(1, keep_best_k=1, best_metric="loss", best_mode=mode).to_remove(checkpoints)
    assert losses.keys() - set(removed) == kept


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_latest_k": -1}, "keep_latest_k=-1: expected a whole number, 0 or more"),
        ({"keep_every_n_steps": 1.5}, r"keep_every_n_steps=1\.5: expected a whole number"),
        ({"keep_best_k": 1}, "give best_metric"),
        ({"best_mode": "least"}, "best_mode='least': expected 'min' or 'max'"),
    ],
)
def test_a_policy_that_cannot_be_kept_is_an_error(options: dict[str, Any], text: str) -> None:
    """Wrong numbers, a rule without its metric and an unknown mode are refused when the policy is made."""
    with pytest.raises(CheckpointingException, match=text):
        Retention(**options)

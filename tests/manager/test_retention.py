from __future__ import annotations

import json
import math
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig
from shardckpt.manager.garbage_collection import collect_garbage
from shardckpt.manager.retention import (
    RETENTION,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNear,
    KeepPinned,
    KeepRecent,
    Metrics,
    UnknownMetricError,
    steps_to_remove,
)
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manager.retention import RetentionPolicy, StepMetrics
    from tests.clock import Clock

STEPS = st.lists(st.integers(0, 200), unique=True, max_size=20)
METRIC = st.one_of(st.none(), st.just(math.nan), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=2))
CHECKPOINTS = st.dictionaries(st.integers(0, 200), st.fixed_dictionaries({}, optional={"loss": METRIC}), max_size=20)
LATEST = st.builds(KeepLatest, st.integers(1, 6))
EVERY = st.builds(KeepEvery, st.integers(1, 20))
BEST = st.builds(KeepBest, st.just("loss"), st.integers(1, 4), st.sampled_from(["min", "max"]))
PINNED = st.builds(KeepPinned, st.lists(st.integers(0, 200), max_size=4))
NOTHING: RetentionPolicy = lambda _: ()  # noqa: E731 - as users write them


def _without_metrics(*steps: int) -> dict[int, dict[str, Any]]:
    return {step: {} for step in steps}


@given(CHECKPOINTS, st.lists(st.one_of(LATEST, EVERY, BEST, PINNED), min_size=1), st.sets(st.integers(0, 200)))
def test_what_any_policy_keeps_is_kept(
    checkpoints: dict[int, dict[str, Any]], policies: list[RetentionPolicy], protected: set[int]
) -> None:
    """The union of what the policies keep stays, the protected and the highest step too; all else goes.

    Where no step has the metric by which the best are kept, none goes.
    """
    numbers = [each.get("loss") for each in checkpoints.values()]
    has_metric = any(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers)
    try:
        removed = steps_to_remove(policies, checkpoints, protected)
    except UnknownMetricError:
        assert not has_metric
        assert any(isinstance(policy, KeepBest) for policy in policies)
        return
    ordered = dict(sorted(checkpoints.items()))
    kept = {step for policy in policies for step in policy(ordered)} | protected | set(list(ordered)[-1:])
    assert removed == sorted(checkpoints.keys() - kept)


@given(CHECKPOINTS, BEST)
def test_the_best_are_the_first_in_order(checkpoints: dict[int, dict[str, Any]], policy: KeepBest) -> None:
    """No step that is not kept has a better value than one that is, nor the same and is newer."""
    kept = policy(checkpoints)
    values = {step: metrics.get("loss") for step, metrics in checkpoints.items()}
    numbers = {step: value for step, value in values.items() if isinstance(value, int | float)}
    numbers = {step: value for step, value in numbers.items() if math.isfinite(value)}
    sign = 1 if policy.mode == "max" else -1
    ranked = sorted(numbers, key=lambda step: (sign * numbers[step], step), reverse=True)
    assert kept == ranked[: policy.count]


@given(STEPS, st.integers(1, 5), st.randoms())
def test_the_newest_is_never_removed(steps: list[int], count: int, shuffle: Any) -> None:
    """In whatever order they are listed the highest step stays, also where no policy keeps anything."""
    listed = list(steps)
    shuffle.shuffle(listed)
    removed = steps_to_remove([KeepLatest(count)], _without_metrics(*listed))
    assert max(steps, default=None) not in removed
    assert len(removed) == max(0, len(steps) - count)
    assert steps_to_remove([NOTHING], _without_metrics(*listed)) == sorted(steps)[:-1]


def test_numbers_are_compared_and_not_names() -> None:
    """Step 1000 is newer than step 999."""
    assert steps_to_remove([KeepLatest(2)], _without_metrics(1000, 20, 999)) == [20]


def test_without_a_policy_all_are_kept() -> None:
    """An empty list of policies keeps every checkpoint, and so does ``keep_latest_k=0`` whatever else is given."""
    assert steps_to_remove([], _without_metrics(1, 2, 3)) == []
    config = CheckpointConfig(keep_latest_k=0, keep_every_n_steps=7, keep_best_k=1, best_metric="loss")
    assert config.retention_policies == ()


@table(("mode", "kept"), [("min", {4, 9}), ("max", {5, 9})])
def test_of_equals_the_newer_is_the_best(mode: Any, kept: set[int]) -> None:
    """Ties go to the newer; who has no number, or NaN, is never the best."""
    losses: dict[int, Any] = {1: 0.5, 2: math.nan, 3: None, 4: 0.5, 5: 0.9, 6: "0.1", 7: True, 9: 0.7}
    checkpoints: StepMetrics = {step: {} if loss is None else {"loss": loss} for step, loss in losses.items()}
    removed = steps_to_remove([KeepLatest(1), KeepBest("loss", mode=mode)], checkpoints)
    assert losses.keys() - set(removed) == kept


def test_the_options_are_policies() -> None:
    """Each of the ``keep_`` options is the policy of the same meaning; those that are 0 are none."""
    assert CheckpointConfig().retention_policies == (KeepLatest(10),)
    config = CheckpointConfig(
        keep_latest_k=2, keep_every_n_steps=100, keep_best_k=3, best_metric="loss", best_mode="max"
    )
    assert config.retention_policies == (KeepLatest(2), KeepEvery(100), KeepBest("loss", 3, "max"))


@table(
    ("options", "message"),
    [
        ({"retention": 3}, "CheckpointConfig: retention: 3 is not a retention policy: give KeepLatest"),
        ({"retention": [KeepLatest]}, "is not a retention policy"),
        ({"retention": [{"policy": "KeepNone"}]}, "is not a retention policy"),
        ({"retention": [{"policy": "KeepLatest", "counts": 2}]}, "counts"),
        ({"retention": [{"policy": "KeepLatest", "count": True}]}, "count: expected a number, not True"),
        ({"retention": [{"policy": "KeepPinned", "steps": [True]}]}, "steps: expected a number, not True"),
        ({"save_when": [{"policy": "SaveEvery", "interval": True}]}, "interval: expected a number, not True"),
        ({"save_when": [{"policy": "SaveAfter", "seconds": True}]}, "seconds: expected a number, not True"),
        ({"retention": [lambda steps, metrics: []]}, "lambda.* is not a retention policy.* the metrics by step"),
        ({"save_when": [lambda step, metrics: True]}, "lambda.* is not a save policy"),
        ({"retention": ["tests.manager.some_function"]}, "is not a retention policy"),
        ({"retention": [KeepLatest(2)], "keep_best_k": 1, "best_metric": "loss"}, "the place of keep_best_k: "),
        ({"retention": [KeepLatest(1)], "async_mode": "async"}, "keep 2 or more"),
    ],
)
def test_a_configuration_refuses_what_is_no_policy(options: dict[str, Any], message: str) -> None:
    """What is neither a policy nor a function is refused with what to give, and so is a policy beside an option."""
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**options)


def test_policies_are_stored_and_read_back() -> None:
    """A stored configuration has the built-in policies as JSON that makes them again, and another by its name."""
    policies = (KeepLatest(2), KeepEvery(50), KeepBest("loss", 3, "max"), KeepPinned((4, 7)))
    config = CheckpointConfig(retention=policies)
    stored = json.loads(json.dumps(config.describe()))
    assert stored["retention"][1] == {"policy": "KeepEvery", "interval": 50}
    assert CheckpointConfig(**stored) == config
    assert CheckpointConfig(retention=KeepLatest(2)).retention == (KeepLatest(2),)
    named = CheckpointConfig(retention=[_Odd()]).describe()["retention"]
    assert named == ["tests.manager.test_retention._Odd"]


class _Odd:
    """A policy with a state of its own."""

    def __call__(self, steps: StepMetrics) -> set[int]:
        """The odd steps."""
        return {step for step in steps if step % 2}


def test_any_callable_is_a_policy() -> None:
    """It is given metrics by step in ascending order, and may return any iterable of whole numbers."""
    checkpoints = {30: {"loss": 1.0}, 4: {}, 5: {"loss": 0.5}, 12: {}}
    seen: list[Any] = []

    def policy(steps: StepMetrics) -> Any:
        seen.append(dict(steps))
        return (np.int64(step) for step in (4, 999))

    assert steps_to_remove([policy], checkpoints) == [5, 12]
    assert [list(each) for each in seen] == [[4, 5, 12, 30]]
    assert seen[0][5] == {"loss": 0.5}
    assert steps_to_remove([_Odd(), policy], checkpoints) == [12]
    assert RETENTION.describe(_Odd()) == "tests.manager.test_retention._Odd"


@table("returned", [None, 3.0, "12", [True, False], [1.5], [[1]]])
def test_what_is_no_list_of_steps_is_an_error(returned: Any) -> None:
    """A policy that returns something else is named, with what it returned and what to return: nothing is removed."""

    def policy(_: StepMetrics) -> Any:
        return returned

    with pytest.raises(CheckpointingException, match=r"policy tests\..*\.policy returned .* return the steps to keep"):
        steps_to_remove([policy], _without_metrics(1, 2))


def test_a_configuration_has_a_json_schema() -> None:
    """Tools that make forms of configurations get a schema, with any value as a policy; a wrong one is named."""
    assert "retention" in CheckpointConfig.model_json_schema()["properties"]
    with pytest.raises(ValueError, match="is not a retention policy"):
        CheckpointConfig(retention=[{"policy": ["KeepLatest"]}])


def test_the_error_of_an_unknown_metric_can_be_pickled() -> None:
    """A pool of processes passes it on with its text, and with what it names."""
    error = UnknownMetricError("los", ["loss"])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.metric, copy.known) == (str(error), "los", ["loss"])


@given(st.sets(st.integers(0, 300), max_size=30), st.integers(1, 60))
def test_the_closest_to_every_multiple_is_kept(steps: set[int], interval: int) -> None:
    """For each multiple that a step is nearest to, exactly one is kept, and none is closer to it."""
    kept = KeepNear(interval)({step: {} for step in sorted(steps)})
    groups: dict[int, list[int]] = {}
    for step in steps:
        low = step // interval * interval
        groups.setdefault(low if step - low < low + interval - step else low + interval, []).append(step)
    assert kept == sorted(min(group, key=lambda s: (abs(s - multiple), s)) for multiple, group in groups.items())


def test_steps_of_the_last_hours_are_kept(tmp_path: Path, clock: Clock) -> None:
    """By the time that the manager wrote, else by the file's; a step of an unknown time is kept."""
    now = clock.now
    steps = {1: Metrics({}, now - 7300), 2: Metrics({}, now - 7100), 3: Metrics({}), 4: {"loss": 1.0}}
    assert KeepRecent(hours=2)(steps) == [2, 3, 4]
    folders.save_all(tmp_path, 1, 2, 3)
    for number in (1, 2):
        os.utime(tmp_path / f"step-{number}" / "metadata.json", (now - 9000, now - 9000 * (2 - number)))
    assert collect_garbage(folders.steps_of(tmp_path), [KeepRecent(hours=2)]) == [1]

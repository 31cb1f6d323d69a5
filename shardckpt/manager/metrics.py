"""The metrics of a step, as a checkpoint stores them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException, show_given
from shardckpt.manifest.names import CONTENT_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_metric(value: Any) -> float | None:
    """Return a number of a file as a float; None for anything else, and for numbers that are no finite float.

    Another program may have written it: an error here would stop the retention of all steps.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_managed(content: Any) -> dict[str, Any]:
    """Return a manager's part of the ``content_metadata`` of a step; empty where another program wrote anything."""
    managed = content.get(CONTENT_KEY) if isinstance(content, dict) else None
    return managed if isinstance(managed, dict) else {}


def read_metrics(content: Any) -> dict[str, float | None]:
    """Return the metrics in the ``content_metadata`` of a step."""
    metrics = read_managed(content).get("metrics")
    return {name: read_metric(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}


class StoredSettings(NamedTuple):
    """The configuration of the manager that saved a step, as its content has it.

    ``ranking`` is the metric by which it chooses the best step, and whether the smallest (``min``) or the largest
    (``max``) value is the best; None if it names none. ``links`` says whether it keeps the links ``latest`` and
    ``best``.
    """

    ranking: tuple[str, str] | None
    links: bool


def read_save_time(content: Any) -> float | None:
    """Return when the manager that saved a step did so, in seconds since 1970, as its ``content_metadata`` says."""
    return read_metric(read_managed(content).get("saved_at"))


def read_settings(content: Any) -> StoredSettings:
    """Return the settings that the manager of a step has stored in its ``content_metadata``."""
    config = read_managed(content).get("config")
    if not isinstance(config, dict):
        return StoredSettings(None, links=False)
    policies = config.get("retention")
    known = [each for each in (policies if isinstance(policies, list) else []) if isinstance(each, dict)]
    kept = next((each for each in known if each.get("policy") == "KeepBest"), None)
    named = (config.get("best_metric"), config.get("best_mode"))
    metric, mode = named if kept is None else (kept.get("metric"), kept.get("mode"))
    ranking = (metric, str(mode)) if isinstance(metric, str) and metric and mode in ("min", "max") else None
    return StoredSettings(ranking, config.get("links") is True)


def rank_steps(steps: Mapping[int, Mapping[str, Any]], metric: str, mode: str) -> list[int]:
    """Return the steps that have a finite value of a metric, the best first; of equal values, the newer step.

    ``mode`` says whether the smallest (``min``) or the largest (``max``) value is the best.
    """
    sign = -1 if mode == "min" else 1
    values = [(step, read_metric(metrics.get(metric))) for step, metrics in steps.items()]
    return [
        step for _, step in sorted(((sign * value, step) for step, value in values if value is not None), reverse=True)
    ]


def parse_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a step for JSON: floats by name; None for NaN and infinity, which JSON does not have.

    Values are numbers, or tensors and arrays of one number; anything else is an error.
    """
    numbers: dict[str, float | None] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):  # 1 and "1" would be one metric
            raise CheckpointingException(f"the metric {show_given(name)} is no name: give texts, {{'loss': 0.25}}")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as exc:
            raise CheckpointingException(f"the metric {name!r} is {value!r:.100}: give one number") from exc
        numbers[name] = read_metric(number)
    return numbers

"""Which checkpoints a folder keeps: a list of policies, each a function of the steps that are there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from shardckpt.errors import CheckpointingException

#: The metrics of each checkpoint by its step, in ascending order of the steps.
StepMetrics = Mapping[int, Mapping[str, Any]]
#: Returns the steps to keep, of those that it is given. The main rank alone calls it, in the thread that removes
#: checkpoints, after a save is durable.
RetentionPolicy = Callable[[StepMetrics], Iterable[int]]

_Count = Annotated[int, Field(ge=1)]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class KeepLatest:
    """Keeps the highest steps.

    Attributes:
        count: How many.
    """

    count: _Count

    def __call__(self, steps: StepMetrics) -> list[int]:
        """The last of the steps."""
        return list(steps)[-self.count :]


@dataclass(frozen=True, config=_STRICT)
class KeepEvery:
    """Keeps the multiples of a number of steps.

    Attributes:
        interval: The number.
    """

    interval: _Count

    def __call__(self, steps: StepMetrics) -> list[int]:
        """The steps that the interval divides."""
        return [step for step in steps if step % self.interval == 0]


@dataclass(frozen=True, config=_STRICT)
class KeepBest:
    """Keeps the steps with the best value of a metric; of equal values the newer step.

    A step without the metric, or with one that is not a number, is never one of the best.

    Attributes:
        metric: A name among the ``metrics`` that ``CheckpointManager.save`` is given.
        count: How many.
        mode: Whether the smallest (``min``) or the largest value is the best.
    """

    metric: Annotated[str, Field(min_length=1)]
    count: _Count = 1
    mode: Literal["min", "max"] = "min"

    def __call__(self, steps: StepMetrics) -> list[int]:
        """The steps with the best values."""
        sign = -1 if self.mode == "min" else 1
        values = [(step, metrics.get(self.metric)) for step, metrics in steps.items()]
        ranked = sorted(((sign * value, step) for step, value in values if _is_number(value)), reverse=True)
        return [step for _, step in ranked[: self.count]]


@dataclass(frozen=True, config=_STRICT)
class KeepPinned:
    """Keeps certain steps.

    Attributes:
        steps: Their numbers.
    """

    steps: tuple[Annotated[int, Field(ge=0)], ...]

    def __call__(self, steps: StepMetrics) -> list[int]:
        """The pinned steps that are there."""
        return [step for step in self.steps if step in steps]


_BUILT_IN = {policy.__name__: policy for policy in (KeepLatest, KeepEvery, KeepBest, KeepPinned)}


def steps_to_remove(
    policies: Collection[RetentionPolicy], checkpoints: StepMetrics, protected: Collection[int] = ()
) -> list[int]:
    """Choose the steps that no policy keeps; the highest step is always kept.

    Args:
        policies: Without any, all steps are kept.
        checkpoints: Step and metrics of each whole checkpoint.
        protected: Steps that are kept whatever the policies return.

    Returns:
        The steps in ascending order.

    Raises:
        CheckpointingException: a policy returned something else than steps.
    """
    if not policies or not checkpoints:
        return []
    kept = {max(checkpoints), *protected}
    for policy in policies:
        kept |= _kept_by(policy, {step: checkpoints[step] for step in sorted(checkpoints)})
    return sorted(checkpoints.keys() - kept)


def parse_policy(given: Any) -> RetentionPolicy:
    """Read a policy of a configuration: a callable, or what :func:`describe_policy` returned for a built-in one.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, dict) and given.get("policy") in _BUILT_IN:
        options = {name: value for name, value in given.items() if name != "policy"}
        return _BUILT_IN[given["policy"]](**options)
    if not callable(given) or isinstance(given, type):
        raise ValueError(
            f"{given!r:.100} is not a retention policy: give KeepLatest(3), KeepEvery(1000), KeepBest('loss', 2), "
            "KeepPinned([500]), or a function that is given the metrics by step and returns the steps to keep"
        )
    return given  # type: ignore[no-any-return]


def describe_policy(policy: Any) -> Any:
    """Describe a policy as JSON: a built-in one with its options, another by its name (it cannot be read back)."""
    if type(policy) in _BUILT_IN.values():
        return {"policy": type(policy).__name__, **dataclasses.asdict(policy)}
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{named.__module__}.{named.__qualname__}"


def _kept_by(policy: RetentionPolicy, steps: StepMetrics) -> set[int]:
    returned: Any = policy(steps)
    kept: list[Any] = list(returned) if isinstance(returned, Iterable) else [returned]
    # A bool is no step: a policy that returns a mask would keep steps 0 and 1, and lose the others.
    if not all(isinstance(step, Integral) and not isinstance(step, bool) for step in kept):
        raise CheckpointingException(
            f"the retention policy {describe_policy(policy)} returned {returned!r:.100}: return the steps to keep, a "
            "list of whole numbers; until it does, no checkpoint is removed"
        )
    return set(kept)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


__all__ = [
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepPinned",
    "RetentionPolicy",
    "StepMetrics",
    "describe_policy",
    "parse_policy",
    "steps_to_remove",
]

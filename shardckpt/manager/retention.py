"""Retention policies: functions that choose which of a folder's checkpoints are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema
from pydantic.dataclasses import dataclass

from shardckpt.errors import CheckpointingException, name_known
from shardckpt.manager.faults import NUMBER, explain_faults
from shardckpt.manager.metrics import rank_steps, read_metric
from shardckpt.manager.policies import PolicyKind

if TYPE_CHECKING:
    from shardckpt.manager.marks import StepState


class Metrics(dict[str, Any]):
    """The metrics of a checkpoint, by name, and further facts that a retention policy may use.

    Attributes:
        saved_at: When it was saved, in seconds since 1970; None if that is not known (on a store, of older releases).
        state: ``verified`` or ``failed`` if ``shardckpt verify --mark`` has said so of this save, else ``candidate``.
        is_foreign: Whether it is in a format that no manager loads.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        saved_at: float | None = None,
        state: StepState = "candidate",
        *,
        is_foreign: bool = False,
    ) -> None:
        super().__init__(metrics)
        self.saved_at = saved_at
        self.state = state
        self.is_foreign = is_foreign


#: The :class:`Metrics` of each checkpoint by its step, in ascending order of the steps.
StepMetrics = Mapping[int, Mapping[str, Any]]
#: A function that takes steps and returns those to keep. Only the main rank calls it, in the thread that removes
#: checkpoints, when a save is durable.
RetentionPolicy = Callable[[StepMetrics], Iterable[int]]

_Count = Annotated[int, NUMBER, Field(ge=1)]
_Steps = tuple[Annotated[int, NUMBER, Field(ge=0)], ...]
_STRICT = ConfigDict(extra="forbid")


def _refuse_mode(metric: str) -> str:
    """Refuse the form of command lines and of other libraries, as ``loss:min``: no metric has that name."""
    name, _, mode = metric.rpartition(":")
    if mode in ("min", "max"):
        raise ValueError(f"the name alone is {name!r}; whether less is better is best_mode={mode!r}, KeepBest's mode")
    return metric


#: The name of a metric in a setting.
MetricName = Annotated[str, AfterValidator(_refuse_mode)]


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class KeepLatest:
    """Keeps the highest steps.

    Attributes:
        count: How many steps.
    """

    count: _Count

    def __call__(self, steps: StepMetrics) -> list[int]:
        """Return the highest steps."""
        return list(steps)[-self.count :]


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class KeepEvery:
    """Keeps the steps that are multiples of ``interval``.

    Attributes:
        interval: Steps from one kept step to the next.
    """

    interval: _Count

    def __call__(self, steps: StepMetrics) -> list[int]:
        """Return the multiples of the interval."""
        return [step for step in steps if step % self.interval == 0]


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class KeepNear:
    """Keeps, for each multiple of a number, the step that is closest to it: for steps that are saved by the clock.

    A step counts for the multiple that it is nearest to; of two that are as close, the lower is kept.

    Attributes:
        interval: The number, in steps.
    """

    interval: _Count

    def __call__(self, steps: StepMetrics) -> list[int]:
        """Return the closest step of each multiple that has one."""
        closest: dict[int, int] = {}
        for step in sorted(steps):
            multiple = (2 * step + self.interval) // (2 * self.interval) * self.interval
            best = closest.setdefault(multiple, step)
            if abs(step - multiple) < abs(best - multiple):
                closest[multiple] = step
        return sorted(closest.values())


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class KeepRecent:
    """Keeps the steps that were saved in the last hours; one whose time is not known, too.

    Attributes:
        hours: How many.
    """

    hours: Annotated[float, NUMBER, Field(gt=0, allow_inf_nan=False)]

    def __call__(self, steps: StepMetrics) -> list[int]:
        """Return the steps that are not older."""
        oldest = time.time() - 3600 * self.hours
        times = {step: getattr(metrics, "saved_at", None) for step, metrics in steps.items()}
        return [step for step, saved_at in times.items() if saved_at is None or saved_at >= oldest]


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class KeepBest:
    """Keeps the steps with the best values of a metric; of equal values, the newer step.

    A step without the metric, or whose metric is not a finite number, is never one of the best. While no step has the
    metric, whose name may be misspelt, no policy removes any.

    Attributes:
        metric: A name among the ``metrics`` that ``CheckpointManager.save`` is given.
        count: How many steps.
        mode: Whether the smallest (``min``) or the largest (``max``) value is the best.
    """

    metric: Annotated[MetricName, Field(min_length=1)]
    count: _Count = 1
    mode: Literal["min", "max"] = "min"

    def __call__(self, steps: StepMetrics) -> list[int]:
        """Return the steps with the best values, the best first."""
        return rank_steps(steps, self.metric, self.mode)[: self.count]


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class KeepPinned:
    """Keeps certain steps.

    Attributes:
        steps: Their numbers.
    """

    # Any collection, a list most often; a tuple of it is kept.
    steps: Annotated[Collection[int], GetPydanticSchema(lambda _, handler: handler.generate_schema(_Steps))]

    def __call__(self, steps: StepMetrics) -> list[int]:
        """Return the pinned steps that exist."""
        return [step for step in self.steps if step in steps]


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class KeepVerified:
    """Keeps the highest steps that ``shardckpt verify --mark`` has found to be as they were written.

    Attributes:
        count: How many steps.
    """

    count: _Count

    def __call__(self, steps: StepMetrics) -> list[int]:
        """Return the highest verified steps."""
        return [step for step in steps if get_state(steps[step]) == "verified"][-self.count :]


#: The kind of policies that choose the steps to keep.
RETENTION = PolicyKind(
    *(KeepLatest, KeepEvery, KeepNear, KeepRecent, KeepBest, KeepPinned, KeepVerified),
    what="a retention policy: give KeepLatest(3), KeepEvery(1000), KeepNear(1000), KeepRecent(hours=24), "
    "KeepBest('loss', 2), KeepPinned([500]), KeepVerified(1), or a function that is given the metrics by step and "
    "returns the steps to keep",
    example=KeepLatest(3),
)


#: Why a policy keeps a step. A class that is not here counts as a user's function: it is shown steps that failed, too.
_REASONS: dict[type[Any], str] = {
    KeepLatest: "among the newest {count}",
    KeepEvery: "a multiple of {interval}",
    KeepNear: "nearest to a multiple of {interval}",
    KeepRecent: "saved in the last {hours:g} h",
    KeepBest: "among the best {count} by {metric} ({mode})",
    KeepPinned: "to be kept by its number",
    KeepVerified: "among the newest {count} that are verified",
}


def explain_policy(policy: RetentionPolicy) -> str:
    """Return why a policy keeps a step, as reports say it; a function has its name."""
    reason = _REASONS.get(type(policy))
    return f"{RETENTION.describe(policy)} keeps it" if reason is None else reason.format_map(vars(policy))


def get_state(metrics: Mapping[str, Any]) -> StepState:
    """Return the verification state of a step, given its metrics."""
    return metrics.state if isinstance(metrics, Metrics) else "candidate"


def find_needed_steps(checkpoints: StepMetrics) -> dict[int, str]:
    """Return the steps that no policy may remove, each with the reason.

    They are the newest; the newest that was not marked as failed, also among those that a manager loads; and the newest
    verified one.
    """
    states = {step: get_state(metrics) for step, metrics in sorted(checkpoints.items())}
    sound = [step for step, state in states.items() if state != "failed"]
    reasons = {
        "it is the newest verified one": [step for step, state in states.items() if state == "verified"],
        "it is the newest that a manager loads": [
            step for step in sound if not getattr(checkpoints[step], "is_foreign", False)
        ],
        "it is the newest that has not failed": sound,
        "it is the newest": list(states),
    }
    return {steps[-1]: reason for reason, steps in reasons.items() if steps}


def steps_to_remove(
    policies: Collection[RetentionPolicy], checkpoints: StepMetrics, protected: Collection[int] = ()
) -> list[int]:
    """Return the steps that no policy keeps, in ascending order, but none that :func:`find_needed_steps` names.

    Without policies all steps are kept; those in ``protected`` whatever the policies return. A policy that returns
    something other than steps is an error, and so is, where some would go, a metric that no step has.
    """
    if not policies or not checkpoints:
        return []
    kept = {*find_needed_steps(checkpoints), *protected}
    for policy in policies:
        kept |= find_kept(policy, checkpoints)
    if chosen := sorted(checkpoints.keys() - kept):
        refuse_unknown_metrics(policies, checkpoints.values())
    return chosen


def find_kept(policy: RetentionPolicy, checkpoints: StepMetrics) -> set[int]:
    """Return the steps that a policy keeps; it is an error if it returned something other than steps.

    A step that is marked as failed takes no other's place: a counting policy keeps the steps that it would keep without
    it, too. A function is told which have failed, and decides.
    """
    steps = {step: checkpoints[step] for step in sorted(checkpoints)}
    sound = {step: metrics for step, metrics in steps.items() if get_state(metrics) != "failed"}
    kept = _kept_by(policy, steps)
    return kept if type(policy) not in _REASONS or len(sound) == len(steps) else kept | _kept_by(policy, sound)


class UnknownMetricError(CheckpointingException):
    """A policy asks for the best steps by a metric that no step has; ``known`` are those there are."""

    def __init__(self, metric: str, known: Collection[str]) -> None:
        super().__init__(
            f"no step has a value of the metric {metric!r}, so that none would be the best, and nothing was removed "
            f"{name_known(metric, known, 'metrics')}"
        )
        self.metric, self.known = metric, known

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would call it with the text
        return type(self), (self.metric, self.known), vars(self)


def refuse_unknown_metrics(policies: Collection[RetentionPolicy], steps: Iterable[Mapping[str, Any]]) -> None:
    """Raise UnknownMetricError if a policy asks for a metric that no step has a finite value of: it would keep none."""
    known = {name for metrics in steps for name, value in metrics.items() if read_metric(value) is not None}
    for policy in policies:
        if isinstance(policy, KeepBest) and policy.metric not in known:
            raise UnknownMetricError(policy.metric, known)


def _kept_by(policy: RetentionPolicy, steps: StepMetrics) -> set[int]:
    try:
        returned: Any = policy(steps)
    except Exception as exc:
        raise CheckpointingException(
            f"the retention policy {RETENTION.describe(policy)} raised {type(exc).__name__}: {exc}; until it returns, "
            "no checkpoint is removed"
        ) from exc
    kept: list[Any] = list(returned) if isinstance(returned, Iterable) else [returned]
    # A bool is no step: a policy that returns a mask would keep steps 0 and 1, and lose the others.
    if not all(isinstance(step, Integral) and not isinstance(step, bool) for step in kept):
        raise CheckpointingException(
            f"the retention policy {RETENTION.describe(policy)} returned {returned!r:.100}: return the steps to "
            "keep, a list of whole numbers; until it does, no checkpoint is removed"
        )
    return set(kept)

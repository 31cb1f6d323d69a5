"""Save policies: functions that choose the steps of a training that are saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, GetPydanticSchema
from pydantic.dataclasses import dataclass

from shardckpt.errors import CheckpointingException
from shardckpt.manager.faults import NUMBER, explain_faults
from shardckpt.manager.policies import PolicyKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.distributed.comm import Comm

_STRICT = ConfigDict(extra="forbid")
_Steps = frozenset[Annotated[int, NUMBER, Field(ge=0)]]


class Moment(NamedTuple):
    """The input of a save policy.

    Attributes:
        step: How many steps the training has made.
        seconds: Seconds since the manager has saved last, or since it was made.
        metrics: The metrics that ``save`` was given for the step.
    """

    step: int
    seconds: float
    metrics: Mapping[str, Any]


#: A function that returns whether a step is saved. Only the main rank calls it, and tells the others.
SavePolicy = Callable[[Moment], bool]


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class SaveEvery:
    """Saves the steps that are multiples of ``interval``.

    Attributes:
        interval: Steps from one save to the next.
    """

    interval: Annotated[int, NUMBER, Field(ge=1)]

    def __call__(self, moment: Moment) -> bool:
        """Return whether the step is a multiple other than 0."""
        return moment.step > 0 and moment.step % self.interval == 0


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class SaveAt:
    """Saves certain steps.

    Attributes:
        steps: Their numbers.
    """

    # Any collection, a list most often; a set of it is kept.
    steps: Annotated[Collection[int], GetPydanticSchema(lambda _, handler: handler.generate_schema(_Steps))]

    def __call__(self, moment: Moment) -> bool:
        """Return whether the step is one of them."""
        return moment.step in self.steps


@explain_faults
@dataclass(frozen=True, config=_STRICT)
class SaveAfter:
    """Saves the first step that ends ``seconds`` or more after the last save, by the main rank's clock.

    Attributes:
        seconds: The least time between two saves.
    """

    seconds: Annotated[float, NUMBER, Field(gt=0, allow_inf_nan=False)]

    def __call__(self, moment: Moment) -> bool:
        """Return whether the time has passed."""
        return moment.seconds >= self.seconds


#: The kind of policies that choose the steps to save.
SAVING = PolicyKind(
    *(SaveEvery, SaveAt, SaveAfter),
    what="a save policy: give SaveEvery(500), SaveAt([1000, 2000]), SaveAfter(seconds=1800), or a function that is "
    "given the step, the seconds since the last save and the metrics (Moment), and returns whether to save",
    example=SaveEvery(500),
)


class SaveClock:
    """Says which steps of a training are due: each step that any of the policies chooses."""

    def __init__(self, policies: Sequence[SavePolicy]) -> None:
        # every rank gets the same answer from these; a subclass may look at clocks and metrics
        self._local = [policy for policy in policies if type(policy) in (SaveEvery, SaveAt)]
        self._on_main = [policy for policy in policies if type(policy) not in (SaveEvery, SaveAt)]
        self._last = time.monotonic()

    def is_due(self, step: int, metrics: Mapping[str, Any], comm: Comm) -> bool:
        """Collective if any policy is neither SaveEvery nor SaveAt: return whether a step is due.

        It is an error, the same on every rank, if a policy raised, or returned something else.
        """
        moment = Moment(step, time.monotonic() - self._last, metrics)
        due = any(policy(moment) for policy in self._local)
        if due or not self._on_main:
            return due
        return comm.main_runs("asking whether to save", lambda: any(_ask(each, moment) for each in self._on_main))

    def note_save(self) -> None:
        """Note that a step was saved now, or begins to be."""
        self._last = time.monotonic()


def _ask(policy: SavePolicy, moment: Moment) -> bool:
    answer: Any = policy(moment)
    if answer is None or not hasattr(answer, "__bool__"):
        raise CheckpointingException(
            f"the save policy {SAVING.describe(policy)} returned {answer!r:.100}: return True or False"
        )
    return bool(answer)

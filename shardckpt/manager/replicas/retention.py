"""Which of its own checkpoints a replica keeps: policies over steps, as Retention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.manager.retention import Retention

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.manager.steps import StepFolder

#: So many of the newest stay: one to fall back on.
NEWEST_KEPT = 2


@dataclass(frozen=True)
class _Beside(Retention):
    """Keeps what belongs to the steps' checkpoints.

    Attributes:
        steps: The folder of these.
    """

    steps: StepFolder | None = None

    @property
    def keeps_all(self) -> bool:
        """Never: there is one for every step."""
        return False

    def _full(self) -> set[int]:
        return set() if self.steps is None else set(self.steps.steps())


@dataclass(frozen=True)
class OwnRetention(_Beside):
    """Keeps the newest, and those of every step that has a checkpoint, or may be getting one from another replica.

    Attributes:
        interval: Of the steps' checkpoints.
    """

    interval: int = 1

    def to_remove(
        self, checkpoints: Sequence[tuple[int, Mapping[str, Any]]], protected: Collection[int] = ()
    ) -> list[int]:
        """The steps that may go."""
        full = self._full()
        newest = max(full, default=-1)
        steps = sorted(step for step, _ in checkpoints)
        kept = {*steps[-NEWEST_KEPT:], *full, *protected}
        return [step for step in steps if step not in kept and (step < newest or step % self.interval)]


@dataclass(frozen=True)
class Abandoned(_Beside):
    """Keeps what is before a step: what follows is of a run that was given up.

    Attributes:
        since: The step.
    """

    since: int = 0

    def to_remove(
        self, checkpoints: Sequence[tuple[int, Mapping[str, Any]]], protected: Collection[int] = ()
    ) -> list[int]:
        """The steps that may go."""
        kept = {*self._full(), *protected}
        return [step for step, _ in checkpoints if step >= self.since and step not in kept]


__all__ = ["NEWEST_KEPT", "Abandoned", "OwnRetention"]

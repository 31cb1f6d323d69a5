"""Which checkpoints a folder keeps: a policy over steps and metrics, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


@dataclass(frozen=True)
class Retention:
    """What is kept; a checkpoint that any of the rules keeps is kept.

    Attributes:
        keep_latest_k: So many of the highest steps, at least the highest; 0 keeps all, whatever the other rules say.
        keep_every_n_steps: Steps that this divides; 0 for none.
        keep_best_k: So many with the best ``best_metric``; of equals the newer. Who has no such metric, or NaN, is
            never one of the best.
        best_metric: Its name.
        best_mode: Whether the smallest or the largest is the best.

    Raises:
        CheckpointingException: a number is negative, or the rule of the best is incomplete.
    """

    keep_latest_k: int = 0
    keep_every_n_steps: int = 0
    keep_best_k: int = 0
    best_metric: str = ""
    best_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("keep_latest_k", "keep_every_n_steps", "keep_best_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise CheckpointingException(f"{name}={value!r}: expected a whole number, 0 or more")
        if self.keep_best_k and not self.best_metric:
            raise CheckpointingException("keep_best_k needs the name of a metric: give best_metric")
        if self.best_mode not in ("min", "max"):
            raise CheckpointingException(f"best_mode={self.best_mode!r}: expected 'min' or 'max'")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever removed."""
        return self.keep_latest_k == 0

    def to_remove(
        self, checkpoints: Sequence[tuple[int, Mapping[str, Any]]], protected: Collection[int] = ()
    ) -> list[int]:
        """The steps that no rule keeps, in ascending order.

        Args:
            checkpoints: Step and metrics of each that is whole; others neither count nor are removed.
            protected: Steps that are kept whatever the rules say.
        """
        if self.keeps_all:
            return []
        steps = sorted(step for step, _ in checkpoints)
        kept = {*steps[-self.keep_latest_k :], *self._best(checkpoints), *protected}
        return [step for step in steps if step not in kept and not self._is_kept_by_number(step)]

    def _is_kept_by_number(self, step: int) -> bool:
        return bool(self.keep_every_n_steps) and step % self.keep_every_n_steps == 0

    def _best(self, checkpoints: Sequence[tuple[int, Mapping[str, Any]]]) -> list[int]:
        sign = -1 if self.best_mode == "min" else 1
        values = [(step, metrics.get(self.best_metric)) for step, metrics in checkpoints]
        ranked = sorted(((sign * value, step) for step, value in values if _is_number(value)), reverse=True)
        return [step for _, step in ranked[: self.keep_best_k]]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


__all__ = ["Retention"]

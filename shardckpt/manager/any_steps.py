"""A folder of steps as an operator sees it: those in formats that no manager loads count, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CannotLoadError, CorruptCheckpointError
from shardckpt.manager.listing import summarize_step
from shardckpt.manager.steps import StepCheckpoint, StepFolder

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path


class AnySteps(StepFolder):
    """A folder of steps that are complete if ``ls`` calls them whole: steps in the Hub's format, and DeepSpeed's."""

    def inspect_step(
        self, step: int, marks: Collection[str] | None = None, directory: Path | None = None
    ) -> StepCheckpoint:
        """Inspect a step's directory; one that no manager loads, as ``ls`` does."""
        found = super().inspect_step(step, marks, directory)
        if found.manifest is not None or not isinstance(found.error, CannotLoadError):
            return found
        summary = summarize_step(self, step)
        if summary.state == "whole":
            return StepCheckpoint(step, changed_at=summary.saved_at, foreign_metrics=summary.metrics)
        if summary.state == "damaged":
            return StepCheckpoint(step, error=CorruptCheckpointError(summary.reason))
        if summary.state == "unreadable":
            return StepCheckpoint(step, error=CannotLoadError(summary.reason))
        return found

"""What one rank has failed with, told to the others, and the one error that all ranks raise for it."""

from __future__ import annotations

from dataclasses import dataclass

from shardckpt import errors
from shardckpt.errors import CheckpointingException, RankFailedError

#: Ranks whose errors are named, beside the first.
_SHOWN = 8


@dataclass(frozen=True)
class Report:
    """An error on its way to the other ranks.

    Attributes:
        rank: Who failed.
        phase: At what.
        kind: Class of the error, if it is of the family.
        message: Its text.
    """

    rank: int
    phase: str
    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException, rank: int, phase: str) -> Report:
        """The report of an error."""
        kind = type(error).__name__ if isinstance(error, CheckpointingException) else ""
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - any class may fail in any way, and the other ranks wait
            text = "(its text cannot be had)"
        return cls(rank, phase, kind, text if kind else f"{type(error).__name__}: {text}")


def verdict(reports: list[Report]) -> CheckpointingException:
    """The one error that all ranks raise: that of the first, with what others have to add."""
    first = reports[0]
    kind = getattr(errors, first.kind, RankFailedError) if first.kind else RankFailedError
    message = f"rank {first.rank}, in {first.phase!r}: {first.message}"
    also = [report for report in reports[1:] if report.message != first.message]
    message += "".join(f"\nrank {report.rank}, in {report.phase!r}: {report.message}" for report in also[:_SHOWN])
    if len(also) > _SHOWN:
        message += f"\n... and {len(also) - _SHOWN} more ranks"
    return kind(message)


__all__ = ["Report", "verdict"]

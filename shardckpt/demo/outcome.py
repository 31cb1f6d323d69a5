"""What the demo found, and the verdict on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from shardckpt.demo.job import Layout, RankResult
    from shardckpt.manifest import Record

#: Largest relative difference of two losses that still counts as agreement. float32 sums are made in another order
#: with another number of ranks, and every step carries the difference on.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Outcome:
    """Results of the group that saved and of those that loaded.

    Attributes:
        groups: Results of every rank, by how they share the model; the group that saved comes first.
        record: What the checkpoint says of its files.
        steps: Training steps before the checkpoint.
    """

    groups: dict[Layout, list[RankResult]]
    record: Record
    steps: int

    @property
    def saver(self) -> Layout:
        """The group that saved."""
        return next(iter(self.groups))

    @property
    def losses(self) -> dict[Layout, list[float]]:
        """Losses after the checkpoint, by group."""
        return {layout: results[0].losses for layout, results in self.groups.items()}

    @property
    def nbytes(self) -> int:
        """Size of the checkpoint."""
        return sum(file.size for file in self.record.files)

    def seconds(self, layout: Layout) -> float:
        """Time of a group's save or load: its slowest rank's."""
        return max(result.seconds for result in self.groups[layout])


def relative_difference(values: tuple[float, ...]) -> float:
    """How far the values lie apart, as a part of the greatest magnitude among them; infinite if one is no number."""
    if not all(map(math.isfinite, values)):
        return math.inf
    greatest = max(map(abs, values))
    return (max(values) - min(values)) / greatest if greatest else 0.0


def largest_difference(outcome: Outcome) -> float:
    """The largest relative difference between the losses of the groups, over all steps."""
    return max(relative_difference(values) for values in zip(*outcome.losses.values(), strict=True))


def check(outcome: Outcome) -> None:
    """Whether the loads gave back what was saved, and training went on alike.

    Raises:
        CheckpointingException: it did not; says what differs.
    """
    faults = []
    saved = outcome.groups[outcome.saver][0].digests
    for layout, results in outcome.groups.items():
        for part, digest in saved.items():
            if any(result.digests[part] != digest for result in results):
                faults.append(f"the {part} of {layout} is not bit for bit what {outcome.saver} saved")
    found = largest_difference(outcome)
    if found > TOLERANCE:
        faults.append(f"losses differ by {found:.1e}, more than the tolerance {TOLERANCE:.0e}")
    if faults:
        raise CheckpointingException("\n".join(faults))


__all__ = ["TOLERANCE", "Outcome", "check", "largest_difference", "relative_difference"]

"""What the runner and its ranks tell each other."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.workloads import SLICES, specs


class Layout(NamedTuple):
    """What ranks hold: a workload at a scale, cut in ``world`` parts along ``axis``."""

    workload: str
    scale: float
    world: int
    axis: int = 0

    def needed(self, *, sliced: bool = False) -> int:
        """Bytes that all ranks together load."""
        tensors = specs(self.workload, self.scale)
        if sliced:
            return sum(spec.nbytes // SLICES for spec in tensors if spec.sliced) * self.world
        return sum(spec.nbytes for spec in tensors)


class Sample(NamedTuple):
    """When an operation began, gave control back, and ended on a rank (seconds of one clock), and bytes it read."""

    start: float
    blocked: float
    end: float
    read: int


__all__ = ["Layout", "Sample"]

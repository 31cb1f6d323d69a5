"""What a simulation measures, by title and unit; the same for every library."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Of every simulated tensor: each rank has 8 rows.
ROWS, COLUMNS = 8, 64


class Figures(dict[tuple[str, str], float]):
    """Values by (title, unit)."""

    def __init__(self) -> None:
        super().__init__()
        self._before = _memory("VmRSS")

    def sent(self, what: str, nbytes: float) -> None:
        """Bytes that leave a rank."""
        self[f"{what}: sent by a rank", "KiB"] = nbytes / (1 << 10)

    def received(self, what: str, nbytes: float) -> None:
        """Bytes that the main rank receives."""
        self[f"{what}: received by rank 0", "MiB"] = nbytes / (1 << 20)

    @contextmanager
    def cpu(self, title: str) -> Iterator[None]:
        """CPU seconds of this process."""
        start = time.process_time()
        yield
        self[title, "s"] = time.process_time() - start

    def peak(self) -> None:
        """By how much this process has grown, the simulated ranks' own shards included."""
        self["peak memory of the simulation", "MiB"] = (_memory("VmHWM") - self._before) / 1024


def _memory(field: str) -> int:
    """KiB."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])


__all__ = ["COLUMNS", "ROWS", "Figures"]

"""Program: let one call of a rank's disk take long, and say what the other ranks raise, and when.

``python -m tests.faults.slow_disk RANK WORLD SECONDS FOLDER CASE COUNT`` prints a report as JSON. strace holds the
call before the system does it, as a disk or file server does that answers late. A call that takes less time than the
group's timeout is no fault: the save succeeds.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardckpt.errors import CheckpointingException
from tests.faults.deaths import StepJob
from tests.faults.killer import Killer, Point, sample
from tests.faults.scenarios import Ranks

_HELD = re.compile(r"^(\d+\.\d+) .*\(DELAYED\)", re.MULTILINE)
_SLOW = ("fsync", "rename", "pwritev2", "pwrite64", "renameat2", "mkdir")


class SlowDisk(Killer):
    """Saves by some ranks, of which one has a disk that answers late, once."""

    def outcomes(self, count: int, seconds: float) -> list[dict[str, Any]]:
        """Hold so many of the calls that change the disk; what came of each."""
        points = [point for point in self.points() if point.call in _SLOW and point.in_main_thread]
        return [self._hold(point, seconds) for point in sample(points, count)]

    def _hold(self, point: Point, seconds: float) -> dict[str, Any]:
        for path in self._folder.glob("told*"):
            path.unlink()
        delay = f"inject={point.call}:delay_enter={int(seconds * 1e6)}:when={point.number}"
        begin = time.monotonic()
        self._save(f"trace={point.call},renameat2", "-e", delay, "-ttt", follow=False)
        held = _HELD.search(self._trace.read_text())
        told = {int(path.name[4:]): json.loads(path.read_text()) for path in self._folder.glob("told*")}
        for found in told.values():
            found[2] -= float(held[1]) if held else 0.0
        return {
            "call": point.call,
            "line": point.line,
            "held": held is not None,
            "seconds": round(time.monotonic() - begin, 1),
            "told": told,
            "state": self._state(),
            "later": self._later(),
            "beside": self._beside(),
        }

    def _change(self) -> None:
        kind, message = "", ""
        try:
            super()._change()
        except CheckpointingException as exc:
            kind, message = type(exc).__name__, str(exc)
        rank = dist.get_rank()
        told = self._folder / f"new{rank}"
        told.write_text(json.dumps([kind, message, time.time()]))
        told.rename(self._folder / f"told{rank}")


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    rank, world, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    folder, case, count = Path(sys.argv[4]), sys.argv[5], int(sys.argv[6])
    slow = SlowDisk(Ranks(folder, rank, world, StepJob.timeout), folder, case)
    json.dump(slow.outcomes(count, seconds), sys.stdout)


if __name__ == "__main__":
    main()

"""Program: fail each file system call of a save once, and say how the save ended and what a load then finds.

``python -m tests.faults.injector SCENARIO FOLDER CASE COUNT`` prints a report as JSON, for ``COUNT`` pairs of a call
and a fault, spread evenly. The calls are found, and children attached to, as ``killer`` does; strace answers the n-th
call of a kind by an error, or by a count of bytes of which none was written (a lie that only digests can find).
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.faults.killer import HARMLESS, TRIES, Killer, Point, sample
from tests.faults.scenarios import make_scenario

if TYPE_CHECKING:
    from tests.faults.scenario import Scenario

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EINTR")
#: What a write says that wrote nothing: all bytes, half of them, none.
LIES = {"lies: all": 1.0, "lies: half": 0.5, "lies: none": 0.0}

_RETURNED = re.compile(r" = (\d+)$")


class Fault(NamedTuple):
    """A fault of a call of a save."""

    point: Point
    name: str

    @property
    def injection(self) -> str:
        """What strace is told."""
        if self.name not in LIES:
            return f"inject={self.point.call}:error={self.name}:when={self.point.number}"
        return f"inject={self.point.call}:retval={self._lie()}:when={self.point.number}"

    def _lie(self) -> int:
        found = _RETURNED.search(self.point.line)
        return int(int(found[1]) * LIES[self.name]) if found else 0


@dataclass
class Ending:
    """How a save with a fault ended, and what was found then.

    Attributes:
        fault: The error's name, or the lie.
        injected: Whether strace answered the call.
        ended: ``"saved"``, an error of the family as ``"refused: ..."``, or what else; ``"hangs"``.
        state: Absent, old, new, set aside, or what is wrong.
        later: What was wrong with the next save; ``""`` for nothing.
        left: Names beside the target after the save.
        beside: Names beside the target after the next save.
        seconds: The save under strace.
    """

    call: str
    number: int
    line: str
    fault: str
    injected: bool
    ended: str
    state: str
    later: str
    left: list[str]
    beside: list[str]
    seconds: float


class Injector(Killer):
    """Saves over one case's directory, again and again, each time with another fault."""

    def __init__(self, scenario: Scenario, folder: Path, case: str) -> None:
        self._ended = folder / "ended"
        super().__init__(scenario, folder, case)

    def faults(self) -> list[Fault]:
        """Every fault of every call that the main thread, or the thread that saves, makes on the directory."""
        points = self.points()
        writes = [p for p in points if p.call.startswith(("write", "pwrite")) and _RETURNED.search(p.line)]
        failing = [Fault(point, error) for point in points for error in ERRORS]
        return failing + [Fault(point, lie) for point in writes for lie in LIES]

    def ending(self, fault: Fault) -> Ending:
        """Save with the fault, load, and save again."""
        begin = time.monotonic()
        self._ended.unlink(missing_ok=True)
        calls = f"trace={fault.point.call},renameat2"
        status = self._save(calls, "-e", fault.injection, follow=not fault.point.in_main_thread)
        seconds = time.monotonic() - begin
        ended = "hangs" if status is None else f"status {status}"
        if self._ended.exists() and status == 0:
            ended = self._ended.read_text()
        injected = any(
            "(INJECTED)" in line and str(self._run) in line and re.search(rf"\b{fault.point.call}\(", line)
            for line in self._trace.read_text().splitlines()
        )
        left = self._beside()
        state, later = self._state(), self._later()
        point = fault.point
        return Ending(
            point.call,
            point.number,
            point.line,
            fault.name,
            injected,
            ended,
            state,
            later,
            left,
            self._beside(),
            round(seconds, 3),
        )

    def _change(self) -> None:
        self._scenario.change_and_tell(self._target(), self._ended, overwrite=not self._is_fresh)


def choose(faults: list[Fault], count: int) -> list[Fault]:
    """So many faults, spread over calls and errors; those of calls that change the disk first."""
    by_point = {(fault.point.call, fault.point.number): fault.point for fault in faults}
    if count >= len(faults):
        return faults
    points = sample(list(by_point.values()), count)
    rounds = [[fault for fault in faults if fault.point == point] for point in points]
    picked: list[Fault] = []
    turn = 0
    while len(picked) < count:  # another fault at each call, and then another again
        for number, found in enumerate(rounds):
            if turn < len(found) and len(picked) < count:
                picked.append(found[(turn + number) % len(found)])
        turn += 1
    return picked


def try_fault(injector: Injector, fault: Fault) -> Ending:
    """Save with the fault, again where the call had another number in that run; what did harm is kept."""
    for _ in range(TRIES):
        ending = injector.ending(fault)
        if ending.injected or ending.later or ending.state not in HARMLESS:
            break
        fault = fault._replace(point=injector.find_again(fault.point))
    return ending


def main() -> None:
    """Print what the faults led to."""
    torch.set_num_threads(1)
    name, folder, case, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    injector = Injector(make_scenario(name, folder), folder, case)
    faults = injector.faults()
    endings = [try_fault(injector, fault) for fault in choose(faults, count)]
    json.dump({"faults": len(faults), "endings": [asdict(ending) for ending in endings]}, sys.stdout)


if __name__ == "__main__":
    main()

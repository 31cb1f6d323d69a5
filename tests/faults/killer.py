"""The driver of kills: end a change of a checkpoint at every file system call on its paths; say what a load then finds.

``python -m tests.faults.killer SCENARIO FOLDER CASE COUNT`` prints a report as JSON. What is changed, and how, is a
scenario's (see ``scenarios``). torch is imported once; each point is a forked child that stops itself, gets strace
attached, goes on, and dies at the n-th call of a kind. Calls are counted per kind and thread, as strace does, so
everything lazy is done before. For a call of the main thread strace follows no other; those of a thread that saves have
numbers of their own (see ``behind``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.commit.commit import list_replaced_checkpoints
from shardckpt.errors import CheckpointingException, IncompleteCheckpointError, NotACheckpointError
from tests.faults.forks import wait
from tests.faults.scenario import VERSIONS
from tests.faults.scenarios import make_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.scenario import Scenario

#: Case → options that strace gets besides the kill.
CASES: dict[str, tuple[str, ...]] = {
    "fresh": (),
    "existing": (),
    "existing, no exchange": ("-e", "inject=renameat2:error=EINVAL"),
}

#: What is no harm; a kill that came elsewhere, and did none, is tried again so many times.
HARMLESS = ("absent", "old", "new", "set aside")
TRIES = 4

_CALL = re.compile(r"^(?:(?P<thread>\d+) +)?(?P<call>\w+)\(")
_CHANGES = re.compile(
    r"^(mkdir|write|pwrite|fallocate|fsync|fdatasync|rename|link|unlink|rmdir|symlink|truncate|ftruncate)"
)


class Point(NamedTuple):
    """The n-th call of a kind in a thread, the call as strace shows it, and whether the thread is the main one.

    ``earlier`` is how many calls, of all threads, had its head before it: that of a file, which a thread may write
    where the main one does in another run, is the same then, and ``number`` is not.
    """

    call: str
    number: int
    line: str
    in_main_thread: bool = True
    earlier: int = 0

    @property
    def changes(self) -> bool:
        """Whether the call changes what is on disk."""
        return bool(_CHANGES.match(self.call)) or "O_CREAT" in self.line


@dataclass
class Outcome:
    """What was found after a kill.

    Attributes:
        state: Absent, old, new, set aside, or what is wrong.
        later: What was wrong with the next save; ``""`` for nothing.
        left: Names beside the target after the kill.
        beside: Names beside the target after the next save.
    """

    call: str
    number: int
    line: str
    in_main_thread: bool
    killed: bool
    state: str
    later: str
    left: list[str]
    beside: list[str]


class Killer:
    """Runs a scenario over one case's directory, again and again, each time to another end."""

    def __init__(self, scenario: Scenario, folder: Path, case: str) -> None:
        self._scenario = scenario
        self._folder = folder
        self._case = case
        self._is_fresh = case == "fresh"
        self._pristine = folder / "pristine"
        self._run = folder / "run"
        self._trace = folder / "trace"
        self._traced = 0
        self._pristine.mkdir(exist_ok=True)
        if self._is_fresh and not scenario.makes_folder:
            (self._pristine / "jobs").mkdir()
        if not self._is_fresh:
            scenario.prepare(self._pristine / "ckpt")
            for name, content in scenario.foreign.items():
                (self._pristine / "ckpt" / name).parent.mkdir(exist_ok=True)
                (self._pristine / "ckpt" / name).write_bytes(content)
        scenario.warm_up(folder / "warm")

    def points(self) -> list[Point]:
        """Every call of an undisturbed save that touches the directory."""
        status = self._save("trace=%file,%desc")
        if status != 0:
            raise SystemExit(f"the undisturbed save ended with {status}")
        counts: dict[tuple[str, str], int] = {}
        heads: dict[str, int] = {}
        found = []
        for line in self._trace.read_text().splitlines():
            match = _CALL.match(line)
            if match is None:
                continue
            thread, call = match["thread"] or str(self._traced), match["call"]
            counts[thread, call] = counts.get((thread, call), 0) + 1
            if str(self._run) in line:
                in_main_thread = thread == str(self._traced)
                shown = self._anonymous(line)
                earlier = heads[_head(shown)] = heads.get(_head(shown), -1) + 1
                found.append(Point(call, counts[thread, call], shown, in_main_thread, earlier))
        return found

    def find_again(self, point: Point) -> Point:
        """The same call in another undisturbed run, in which its thread may have made more or fewer calls before it."""
        same = (p for p in self.points() if (_head(p.line), p.earlier) == (_head(point.line), point.earlier))
        return next(same, point)

    def try_point(self, point: Point) -> Outcome:
        """Kill at the point, again where its call had another number in that run; what did harm is kept."""
        for _ in range(TRIES):
            outcome = self.outcome(point)
            if outcome.killed or outcome.later or outcome.state not in HARMLESS:
                break
            point = self.find_again(point)
        return outcome

    def outcome(self, point: Point) -> Outcome:
        """Kill a save at the point, load, and save again."""
        calls = f"trace={point.call},renameat2"  # strace injects only into what it traces
        kill = f"inject={point.call}:signal=KILL:when={point.number}"
        status = self._save(calls, "-e", kill, follow=not point.in_main_thread)
        shown = next(
            (found for line in reversed(self._trace.read_text().splitlines()) if (found := _CALL.match(line))), None
        )
        if shown is None:
            same = False
        elif point.in_main_thread:
            same = _head(self._anonymous(shown.string)) == _head(point.line)
        else:  # each thread has a call of that number, for a file of its own: either comes first
            same = shown["call"] == point.call
        killed = status is not None and "+++ killed by SIGKILL +++" in self._trace.read_text() and same
        left = self._beside()
        state, later = self._state(), self._later()
        return Outcome(*point[:4], killed, state, later, left, self._beside())

    def _target(self) -> Path:
        """A fresh save makes the directory above its target too, where its scenario says so."""
        return self._run / "jobs" / "ckpt" if self._is_fresh else self._run / "ckpt"

    def _beside(self) -> list[str]:
        """Names beside the target."""
        target = self._target()
        return sorted(path.name for path in target.parent.glob("*") if path != target)

    def _save(self, *options: str, follow: bool = True) -> int | None:
        """Wait status of a save in a child under strace, which follows all threads, or the main one alone."""
        shutil.rmtree(self._run, ignore_errors=True)
        shutil.copytree(self._pristine, self._run, symlinks=True)
        self._trace.unlink(missing_ok=True)
        victim, children = self._start()
        self._traced = victim
        command = ["strace", *(["-f"] if follow else []), "-y", "-s", "16", "-o", str(self._trace)]
        command += ["-p", str(victim), "-e", *options]
        if not any(option.startswith("inject=renameat2:") for option in options):
            command += CASES[self._case]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stderr = tracer.stderr
        if stderr is None or "attached" not in (greeting := stderr.readline()):
            for pid in {victim, *children}:
                os.kill(pid, signal.SIGKILL)
            raise SystemExit(f"strace did not attach: {greeting if stderr else ''}")
        for pid in {victim, *children}:
            os.kill(pid, signal.SIGCONT)
        ended = wait(children, 30)
        tracer.wait(10)
        stderr.close()
        return None if None in ended.values() else ended[children[0]]

    def _start(self) -> tuple[int, list[int]]:
        """Fork what is killed; the stopped process that strace is attached to, and the children that are waited for."""
        return self._scenario.start(self._change)

    def _change(self) -> None:
        """What is killed."""
        self._scenario.change(self._target(), overwrite=not self._is_fresh)

    def _state(self) -> str:
        """What the target holds, as a load sees it."""
        try:
            found = self._scenario.find(self._target())
        except NotACheckpointError:
            return "absent"
        except IncompleteCheckpointError as exc:
            return self._incomplete(str(exc))
        except CheckpointingException as exc:
            return f"{type(exc).__name__}: {exc}"
        return found if found not in VERSIONS or self._foreign_kept() else f"{found}, but other files are lost"

    def _incomplete(self, message: str) -> str:
        """After a save that was not published: nothing stands at the target, and the message says what to do."""
        if self._target().exists():
            return f"there and incomplete: {message}"
        aside = list_replaced_checkpoints(self._target())
        if not aside:
            return "absent" if "save again" in message else f"no way out in: {message}"
        if str(aside[-1]) not in message:
            return f"does not name {aside[-1]}: {message}"
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(aside[-1], copy)
        found = self._scenario.find(copy)
        return "set aside" if found == "old" else f"set aside, and {found}"

    def _foreign_kept(self) -> bool:
        if self._is_fresh:
            return True
        files = {self._target() / name: content for name, content in self._scenario.foreign.items()}
        return all(path.exists() and path.read_bytes() == content for path, content in files.items())

    def _later(self) -> str:
        """Nothing if the next change of the path succeeds, and leaves what it must, else what is wrong."""
        try:
            expected = self._scenario.go_on(self._target())
        except self._scenario.errors as exc:
            return f"{type(exc).__name__}: {exc}"
        found = self._state()
        return "" if found == expected else found

    def _anonymous(self, line: str) -> str:
        """A traced call without what differs from run to run: process id, ids, addresses, other threads' calls."""
        line = re.sub(r"^\d+ +", "", line).replace(str(self._run), "RUN").removesuffix(" <unfinished ...>")
        return re.sub(r"[0-9a-f]{16,}|0x[0-9a-f]+", "*", line)


def _head(line: str) -> str:
    """The call and its first argument, without the descriptor's number: other threads open files meanwhile."""
    return re.sub(r"\(\d+<", "(<", line.partition(" = ")[0].partition(",")[0].rstrip(") "))


def sample(points: Sequence[Point], count: int) -> list[Point]:
    """All calls that change the disk if they are few enough, and others spread evenly, up to ``count``."""
    first = [point for point in points if point.changes]
    rest = [point for point in points if not point.changes]
    if len(first) > count:
        first, rest = _spread(first, count), []
    return sorted([*first, *_spread(rest, count - len(first))], key=points.index)


def _spread(points: list[Point], count: int) -> list[Point]:
    """So many of the points, the first and the last among them."""
    if len(points) <= count:
        return points
    return [points[index * (len(points) - 1) // max(1, count - 1)] for index in range(count)]


def main() -> None:
    """Print the report."""
    scenario, folder, case, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    killer = Killer(make_scenario(scenario, folder), folder, case)
    points = killer.points()
    outcomes = [killer.try_point(point) for point in sample(points, count)]
    report = {"points": [point._asdict() for point in points], "outcomes": [asdict(outcome) for outcome in outcomes]}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()

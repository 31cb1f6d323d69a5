"""Program: save to a disk that is as large as a save needs, or some pages or inodes smaller, and say what came of it.

``python -m tests.faults.disk_filler SCENARIO FOLDER WHAT CASE COUNT`` prints a report as JSON. ``WHAT`` runs out:
``pages`` or ``inodes`` of a tmpfs that is mounted below the folder, which needs the right to mount. Its size is swept
one by one from that of what is there to that of a whole save, or in ``COUNT`` steps. The forecast of space is off: here
the system itself says that the disk is full, wherever in the save that is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shardckpt import settings
from shardckpt.errors import NotACheckpointError
from tests.faults.behind import fork_workers
from tests.faults.forks import fork, wait
from tests.faults.scenario import NEW, Scenario
from tests.faults.scenarios import Small, Stock
from tests.faults.stock_savers import SAVERS

PAGE = 4096
#: Pages and inodes that are more than enough.
ENOUGH = {"pages": 8192, "inodes": 4096}
#: The option of a tmpfs that limits each.
_OPTIONS = {"pages": "nr_blocks", "inodes": "nr_inodes"}
_TIMEOUT = 60.0


@dataclass
class Full:
    """What came of a save to a disk of a size.

    Attributes:
        size: Pages or inodes of the disk.
        ended: ``"saved"``, an error of the family as ``"refused: ..."``, what else, or ``"hangs"``.
        state: Absent, old, new, or what is wrong.
        later: What was wrong with the next save, when there was room again; ``""`` for nothing.
        beside: Names beside the target after the next save.
    """

    size: int
    ended: str
    state: str
    later: str
    beside: list[str]


class Filler:
    """Saves to one disk, again and again, each time of another size."""

    def __init__(self, scenario: Scenario, folder: Path, what: str, case: str) -> None:
        self._scenario = scenario
        self._told = folder / "ended"
        self._disk = folder / "disk"
        self._target = self._disk / "jobs" / "ckpt"
        self._what = what
        self._is_fresh = case == "fresh"
        self._disk.mkdir()

    def sweep(self, count: int) -> list[Full]:
        """Find how much a save needs, and try every size up to that, or so many of them."""
        with _mounted(self._disk):
            self._prepare()
            before = self._used()
            self._scenario.write(self._target, NEW, overwrite=not self._is_fresh)
            # an overwrite needs both until it has removed the old one, and a little for names
            needed = self._used() + (0 if self._is_fresh else before) + 8
        sizes = list(range(max(before, 1), needed + 1))  # 0 is no limit
        if len(sizes) > count:
            sizes = sorted({sizes[n * (len(sizes) - 1) // (count - 1)] for n in range(count)})
        return [self._try(size) for size in sizes]

    def _try(self, size: int) -> Full:
        with _mounted(self._disk):
            self._prepare()
            _limit(self._disk, self._what, max(size, self._used()))
            ended = self._save()
            state = self._state()
            _limit(self._disk, self._what, ENOUGH[self._what])
            later = self._later()
            beside = sorted(path.name for path in self._target.parent.iterdir() if path != self._target)
            return Full(size, ended, state, later, beside)

    def _save(self) -> str:
        """How a save in a fork ends."""
        self._told.unlink(missing_ok=True)
        (status,) = wait([fork(self._change)], _TIMEOUT).values()
        if status is None:
            return "hangs"
        return self._told.read_text() if self._told.exists() else f"status {status}"

    def _change(self) -> None:
        fork_workers()
        self._scenario.change_and_tell(self._target, self._told, overwrite=not self._is_fresh)

    def _state(self) -> str:
        try:
            return self._scenario.find(self._target)
        except NotACheckpointError:
            return "absent"
        except BaseException as exc:  # noqa: BLE001 - it is in the report
            return f"refused: {type(exc).__name__}: {exc}"

    def _later(self) -> str:
        try:
            expected = self._scenario.go_on(self._target)
        except BaseException as exc:  # noqa: BLE001 - it is in the report
            return f"{type(exc).__name__}: {exc}"
        found = self._state()
        return "" if found == expected else found

    def _prepare(self) -> None:
        self._target.parent.mkdir()
        if not self._is_fresh:
            self._scenario.prepare(self._target)

    def _used(self) -> int:
        found = os.statvfs(self._disk)
        used = {
            "pages": (found.f_blocks - found.f_bfree) * found.f_frsize // PAGE,
            "inodes": found.f_files - found.f_ffree,
        }
        return used[self._what]


class _mounted:  # noqa: N801 - a context manager
    """A tmpfs, large enough, for a block."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk

    def __enter__(self) -> None:
        options = ",".join(f"{_OPTIONS[what]}={number}" for what, number in ENOUGH.items())
        _run("mount", "-t", "tmpfs", "-o", options, "shardckpt-test", str(self._disk))

    def __exit__(self, *_: object) -> None:
        _run("umount", "-l", str(self._disk))  # a load may still have the directory open


def _limit(disk: Path, what: str, number: int) -> None:
    sizes = ENOUGH | {what: number}
    options = ",".join(f"{_OPTIONS[each]}={size}" for each, size in sizes.items())
    _run("mount", "-o", f"remount,{options}", str(disk))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise SystemExit(f"mounting is not permitted: {done.stderr.strip()}")


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    name, folder, what, case, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    os.environ[settings.SPACE_CHECK] = "0"
    scenario = Stock(folder, name) if name in SAVERS else Small(folder, name)
    scenario.warm_up(folder / "warm")
    found = Filler(scenario, folder, what, case).sweep(count)
    json.dump([asdict(each) for each in found], sys.stdout)


if __name__ == "__main__":
    main()

"""Program: save to a disk that is as large as a save needs, or some pages or inodes smaller, and say what came of it.

``python -m tests.faults.disk_filler FOLDER WHAT CASE COUNT WAY`` prints a report as JSON. ``WHAT`` runs out: ``pages``
or ``inodes`` of a tmpfs that is mounted below the folder, which needs the right to mount. Its size is swept one by one
from that of what is there to that of a whole save, or in ``COUNT`` steps. The forecast of space is off: here the system
itself says that the disk is full, wherever in the save that is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing, settings
from shardckpt.errors import CheckpointingException, NotACheckpointError
from tests.faults import samples
from tests.faults.behind import fork_workers, save_in
from tests.faults.forks import fork, wait
from tests.faults.stock_savers import SAVERS, differences

if TYPE_CHECKING:
    from collections.abc import Callable

OLD, NEW, LATER = 1, 2, 3
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


@dataclass(frozen=True)
class Saver:
    """How something saves, and what a load finds: a version, or None where nothing was saved."""

    save: Callable[[Path, int, bool], None]
    load: Callable[[Path], int | None]
    refusals: tuple[type[BaseException], ...]


class Filler:
    """Saves to one disk, again and again, each time of another size."""

    def __init__(self, folder: Path, what: str, case: str, saver: Saver) -> None:
        self._folder = folder
        self._disk = folder / "disk"
        self._target = self._disk / "jobs" / "ckpt"
        self._what = what
        self._case = case
        self._saver = saver
        self._disk.mkdir()

    def sweep(self, count: int) -> list[Full]:
        """Find how much a save needs, and try every size up to that, or so many of them."""
        with _mounted(self._disk):
            self._prepare()
            before = self._used()
            self._saver.save(self._target, NEW, self._case != "fresh")
            # an overwrite needs both until it has removed the old one, and a little for names
            needed = self._used() + (before if self._case != "fresh" else 0) + 8
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
        told = self._folder / "ended"
        told.unlink(missing_ok=True)
        (status,) = wait([fork(partial(self._save_and_tell, told))], _TIMEOUT).values()
        if status is None:
            return "hangs"
        return told.read_text() if told.exists() else f"status {status}"

    def _save_and_tell(self, told: Path) -> None:
        try:
            self._saver.save(self._target, NEW, self._case != "fresh")
        except self._saver.refusals as exc:
            told.write_text(f"refused: {type(exc).__name__}: {exc}")
        except BaseException as exc:  # noqa: BLE001 - it is in the report
            told.write_text(f"{type(exc).__name__}: {exc}")
        else:
            told.write_text("saved")

    def _state(self) -> str:
        try:
            version = self._saver.load(self._target)
        except BaseException as exc:  # noqa: BLE001 - it is in the report
            return f"refused: {type(exc).__name__}: {exc}"
        return {OLD: "old", NEW: "new", None: "absent", 0: "mixed"}.get(version, f"save {version}")

    def _later(self) -> str:
        try:
            self._saver.save(self._target, LATER, True)
            found = self._saver.load(self._target)
        except BaseException as exc:  # noqa: BLE001 - it is in the report
            return f"{type(exc).__name__}: {exc}"
        return "" if found == LATER else f"save {found}"

    def _prepare(self) -> None:
        self._target.parent.mkdir()
        if self._case != "fresh":
            self._saver.save(self._target, OLD, False)

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


def _save_ours(way: str, target: Path, version: int, overwrite: bool) -> None:
    if version != NEW:
        way = "foreground"
    elif way == "process":
        fork_workers()
    save_in(way, target, samples.state_dict(version), overwrite=overwrite)


def _load_ours(target: Path) -> int | None:
    try:
        found = samples.load(target)
    except NotACheckpointError:
        return None
    return _version(found, samples.differences, found["iteration"])


def _version(found: dict[str, Any], compare: Callable[[dict[str, Any], int], list[str]], version: Any) -> int:
    return int(version) if not compare(found, int(version)) else 0


def _make_saver(name: str) -> Saver:
    if name not in SAVERS:
        dist_checkpointing.load  # noqa: B018 - imported before forks
        return Saver(partial(_save_ours, name), _load_ours, (CheckpointingException,))
    save, load, marker = SAVERS[name]

    def load_stock(target: Path) -> int | None:
        if not (target / marker).exists():
            return None
        found = load(target)
        return _version(found, differences, found["step"])

    return Saver(lambda target, version, _: save(target, version), load_stock, (BaseException,))


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    folder, what, case, count, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
    os.environ[settings.SPACE_CHECK] = "0"
    saver = _make_saver(way)
    for overwrite in (False, True):  # what a first save and load import, the forks have
        saver.save(folder / "warm", OLD, overwrite)
    saver.load(folder / "warm")
    found = Filler(folder, what, case, saver).sweep(count)
    json.dump([asdict(each) for each in found], sys.stdout)


if __name__ == "__main__":
    main()

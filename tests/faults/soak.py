"""Program: save over one path again and again, for long, and say what grew, and what every kill and every reader found.

``python -m tests.faults.soak [--minutes 30] [--saves 200] [FOLDER]`` prints a report as JSON, and ends with 1 if a
promise was broken; ``TESTS_BACKEND`` names a format. Jobs of two ranks save over one path and are killed at random, all
at once or one first, while a reader loads without pause. Every save tells its number when it has returned: what a load
finds after a kill is that save, or the one that was under way. Then one process saves and loads so many times, in the
foreground, by a thread and by a process, and its descriptors, threads, shared memory and memory are counted.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.errors import CheckpointingException
from tests import backends
from tests.faults import samples
from tests.faults.forks import fork, kill_at_random, wait

WORLD = 2
_TIMEOUT = 60.0
_SEED = 22
#: Saves before counting: pools, caches and the allocator have their sizes then.
_WARM = 60
#: What may be there more after all saves: a descriptor or a thread that is lost with each save would be 100 and more.
ALLOWED = {"descriptors": 0, "threads": 0, "shared memory": 0, "resident MiB": 32}


def save_often(folder: Path, saves: int) -> list[dict[str, int]]:
    """Save and load so many times in this process; what it held, after each twentieth of them."""
    held = []
    target = folder / "often"
    with AsyncCallsQueue() as threads, AsyncCallsQueue(persistent=True) as processes:
        for number in range(1, saves + 1):
            queue = (None, threads, processes)[number % 3]
            state = samples.state_dict(number)
            if queue is None:
                dist_checkpointing.save(state, target, overwrite=number > 1)
            else:
                request = dist_checkpointing.save(state, target, async_sharded_save=True, overwrite=number > 1)
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)
            if wrong := samples.differences(samples.load(target), number):
                raise SystemExit(f"save {number}: wrong values in {wrong}")
            if number % max(1, saves // 20) == 0:
                held.append({"saves": number, **count_held()})
    return held


def count_held() -> dict[str, int]:
    """What this process holds; of shared memory its own mappings: others have theirs in /dev/shm, too."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mappings = Path("/proc/self/maps").read_text().splitlines()
    shared = {line.split()[4] for line in mappings if "/memfd:" in line or "/dev/shm/" in line}  # by inode
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "shared memory": len(shared),
        "resident MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def find_growth(held: list[dict[str, int]]) -> dict[str, int]:
    """What the last counts have more than the first ones after the warm-up, beyond what is allowed."""
    late = [each for each in held if each["saves"] >= min(_WARM, held[-1]["saves"] // 2)]
    grown = {name: late[-1][name] - late[0][name] for name in ALLOWED}
    return {name: more for name, more in grown.items() if more > ALLOWED[name]}


class Soak:
    """Jobs that are killed, a reader, and an oracle outside of both.

    Args:
        folder: Takes all.
    """

    def __init__(self, folder: Path) -> None:
        self._target = folder / "root" / "ckpt"
        self._folder = folder
        self._told = folder / "returned"
        self._read = folder / "read"
        self._target.parent.mkdir()
        self._chance = random.Random(_SEED)
        self._jobs = 0

    def run(self, seconds: float) -> dict[str, Any]:
        """Kill and look until the time is over; what was found."""
        dist_checkpointing.save(samples.state_dict(1), self._target)
        self._told.write_text("1\n")
        outcomes: Counter[str] = Counter()
        bad: list[str] = []
        end = time.monotonic() + seconds
        reader = fork(self._be_reader)
        while time.monotonic() < end:
            state, version = self._kill_one()
            outcomes[state] += 1
            if state not in ("old", "new"):
                bad.append(f"after job {self._jobs}: {state}, save {version}")
                version += 2
                dist_checkpointing.save(samples.state_dict(version), self._target, overwrite=True)
            with self._told.open("a") as told:  # what is there is where the next job begins
                told.write(f"{version}\n")
        os.kill(reader, signal.SIGTERM)
        if wait([reader], _TIMEOUT)[reader] is None:
            bad.append("the reader hangs")
        dist_checkpointing.save(samples.state_dict(1), self._target, overwrite=True)
        if left := sorted(path.name for path in self._target.parent.iterdir() if path != self._target):
            bad.append(f"left: {left}")
        reads = Counter(line.partition(":")[0] for line in self._read.read_text().splitlines())
        bad += [line for line in self._read.read_text().splitlines() if line.startswith("bad")][:10]
        saves = self._returned()[0]
        return {"kills": dict(outcomes), "saves": saves, "reads": dict(reads), "bad": bad}

    def _returned(self) -> tuple[int, int]:
        """How many saves have returned, and the number of the last one."""
        lines = [line for line in self._told.read_text().split("\n")[:-1] if line]
        return len(lines), int(lines[-1])

    def _kill_one(self) -> tuple[str, int]:
        """Start a job, kill it after a while, and say what is there: the last save that has returned is old."""
        self._jobs += 1
        begin = self._returned()
        pids = [fork(partial(self._be_rank, rank, begin[1] + 1)) for rank in range(WORLD)]
        started = time.monotonic()
        while self._returned()[0] == begin[0] and time.monotonic() < started + _TIMEOUT:
            time.sleep(0.01)  # before the first save has returned, most of the time is that of the group's start
        time.sleep(self._chance.uniform(0, 0.6))
        kill_at_random(pids, self._chance)
        count, last = self._returned()
        if count == begin[0]:
            return "hang", last
        try:
            found = samples.load(self._target)
        except CheckpointingException as exc:
            return f"lost: {exc}", last
        version = int(found["iteration"])
        if samples.differences(found, version):
            return "mixed", last
        return {last: "old", last + 1: "new"}.get(version, f"other: save {version}"), version

    def _be_rank(self, rank: int, version: int) -> None:
        store = dist.FileStore(str(self._folder / f"store{self._jobs}"), WORLD)
        timeout = dt.timedelta(seconds=_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
        with AsyncCallsQueue() as queue, self._told.open("a", buffering=1) as told:
            while True:
                state = samples.state_dict(version, rank, WORLD)
                if version % 2:
                    dist_checkpointing.save(state, self._target, overwrite=True)
                else:
                    request = dist_checkpointing.save(state, self._target, async_sharded_save=True, overwrite=True)
                    queue.schedule_async_request(request)
                    queue.maybe_finalize_async_calls(blocking=True)
                if rank == 0:
                    told.write(f"{version}\n")
                version += 1

    def _be_reader(self) -> None:
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
        last = 0
        with self._read.open("w", buffering=1) as told:
            while not asked:
                try:
                    found = samples.load(self._target)
                except CheckpointingException as exc:
                    told.write(f"refused: {exc}\n".replace("\n", " ").strip() + "\n")
                    continue
                version = int(found["iteration"])
                wrong = samples.differences(found, version)
                told.write(
                    f"bad: save {version} after {last}, wrong {wrong}\n" if wrong or version < last else "whole\n"
                )
                last = version


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description="Save for long, and be killed.")
    parser.add_argument("folder", nargs="?", type=Path, help="takes the checkpoints; a temporary one by default")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long jobs are killed")
    parser.add_argument("--saves", type=int, default=200, help="saves of one process, whose resources are counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backends.become_default()
    with tempfile.TemporaryDirectory(prefix="soak-", dir=options.folder) as folder:
        samples.load(_make_warm(Path(folder)))
        soaked = Soak(Path(folder)).run(options.minutes * 60) if options.minutes else {}
        held = save_often(Path(folder), options.saves) if options.saves else []  # starts threads: no forks after it
    grown = find_growth(held) if held else {}
    json.dump({"held": held, "grown": grown, **soaked}, sys.stdout)
    sys.stdout.write("\n")
    return 1 if grown or soaked.get("bad") else 0


def _make_warm(folder: Path) -> Path:
    """Do once what a first save does lazily: jobs are forks."""
    for overwrite in (False, True):
        dist_checkpointing.save(samples.state_dict(1), folder / "warm", overwrite=overwrite)
    return folder / "warm"


if __name__ == "__main__":
    sys.exit(main())

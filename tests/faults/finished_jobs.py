"""Program: jobs that import shardckpt once their process group is there, use it, destroy the group, and end.

``python -m tests.faults.finished_jobs threads ROOM ...`` prints, as JSON, how many threads of gloo each room leaves.
``python -m tests.faults.finished_jobs exits FOLDER RUNS WORLD`` prints the exit codes of all ranks of all runs of a job
that saves and loads, with threads of gloo that come to run late. torch is imported once; ranks are forked, and end as
any interpreter does.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.faults.forks import report_all

TIMEOUT = dt.timedelta(seconds=60)
_GLOO_THREAD = "pt_gloo_runloop"
_THREADS_OF_A_GROUP = 2


def _gloo_threads() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text().strip() == _GLOO_THREAD]


def _started_gloo_threads() -> list[int]:
    """The threads of a group that was just made: each names itself when it first runs."""
    dist.barrier()
    ends = time.monotonic() + TIMEOUT.total_seconds()
    while len(found := _gloo_threads()) < _THREADS_OF_A_GROUP and time.monotonic() < ends:
        time.sleep(0.01)
    assert found
    return found


def _import_room(room: str) -> int:
    """The threads of gloo that are left after a room was imported, with all that it offers, and the group destroyed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    _started_gloo_threads()
    module = importlib.import_module(room)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
    dist.destroy_process_group()
    return len(_gloo_threads())


def _threads(rooms: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = report_all([partial(_import_room, room) for room in rooms], Path(folder), 1)
    json.dump(dict(zip(rooms, found, strict=True)), sys.stdout)


def _job(folder: Path, rank: int, world: int) -> None:
    """Train nothing, save and load: as short as a job can be."""
    dist.init_process_group("gloo", f"file://{folder / 'store'}", TIMEOUT, world, rank)
    for thread in _started_gloo_threads():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    from shardckpt import dist_checkpointing
    from tests.faults import samples

    dist_checkpointing.save(samples.state_dict(1, rank, world), folder / "ckpt")
    loaded = samples.load(folder / "ckpt", rank, world)
    assert not samples.differences(loaded, 1, rank, world)
    dist.barrier()
    dist.destroy_process_group()


def _exits(folder: Path, runs: int, world: int) -> None:
    codes = []
    for run in range(runs):
        (folder / str(run)).mkdir()
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _job(folder / str(run), rank, world)
                return  # and the interpreter ends as it does for a user
            pids.append(pid)
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    json.dump(codes, sys.stdout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "threads":
        _threads(sys.argv[2:])
    else:
        _exits(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

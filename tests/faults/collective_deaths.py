"""Program: let ranks enter a collective of a smaller group at different times, and one not at all; what do they say?

``python -m tests.faults.collective_deaths FOLDER`` reads scenarios as JSON from standard input and prints the outcomes.
torch is imported once; the ranks of every scenario are forked.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from shardckpt.distributed.comm import Comm
from shardckpt.errors import CommunicationError
from tests.faults.forks import fork, report_all, wait

#: Of a group in which a rank stops, which is found out when it has passed; and of the others, in which none passes.
GROUP_TIMEOUT, LONG_TIMEOUT = 6.0, 300.0
#: Survivors that take longer hang; less than the long timeout.
DEADLINE = 120.0


class Scenario(TypedDict):
    """Which ranks make up the group, after how many seconds each enters, and which ends by ``kill`` or ``stop``.

    With ``none`` its call fails, and it is there.
    """

    members: list[int]
    delays: list[float]
    victim: int
    how: str


def _rank(folder: Path, scenario: Scenario, rank: int, world: int) -> None:
    """One rank's life."""
    timeout = dt.timedelta(seconds=GROUP_TIMEOUT if scenario["how"] == "stop" else LONG_TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world, timeout=timeout
    )
    group = dist.new_group(scenario["members"], timeout)
    dist.barrier()
    if rank not in scenario["members"]:
        return
    comm = Comm(group)
    comm.sync_errors()
    time.sleep(scenario["delays"][rank])
    if rank == scenario["victim"] and scenario["how"] != "none":
        os.kill(os.getpid(), signal.SIGKILL if scenario["how"] == "kill" else signal.SIGSTOP)
    outcome: tuple[str, list[int]] = ("", [])
    try:
        with comm.collective_phase("meeting"):
            if rank == scenario["victim"]:
                comm._call(_fail)
    except CommunicationError as exc:
        outcome = (str(exc), list(exc.missing_ranks))
    (folder / f"outcome{rank}").write_text(json.dumps(outcome))


def _fail() -> None:
    raise RuntimeError("tensors of different sizes")


def _run(folder: Path, scenario: Scenario) -> dict[str, Any]:
    """What each surviving member raised, and the ranks that it names."""
    world = len(scenario["delays"])
    pids = [fork(lambda rank=rank: _rank(folder, scenario, rank, world)) for rank in range(world)]
    wait([pid for rank, pid in enumerate(pids) if rank != scenario["victim"]], DEADLINE)
    wait([pids[scenario["victim"]]], 0.0 if scenario["how"] == "stop" else DEADLINE)
    return {path.name.removeprefix("outcome"): json.loads(path.read_text()) for path in folder.glob("outcome*")}


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    folder, runs = Path(sys.argv[1]), []
    for number, scenario in enumerate(json.load(sys.stdin)):
        (folder / str(number)).mkdir()
        runs.append(partial(_run, folder / str(number), scenario))
    json.dump(report_all(runs, folder, len(runs)), sys.stdout)  # all at a time: they wait, and save nothing


if __name__ == "__main__":
    main()

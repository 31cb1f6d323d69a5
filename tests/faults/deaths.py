"""Program: let one rank of a group end or stop in a given step of a save or load, and say what the others raise.

``python -m tests.faults.deaths FOLDER`` reads scenarios as JSON from standard input and prints what came of them.
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
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardckpt import dist_checkpointing, hookimpl
from shardckpt.plugins.manager import get_plugin_manager
from tests.faults import samples
from tests.faults.forks import fork, report_all, wait

#: Of a group in which a rank stops, which is found out when it has passed.
GROUP_TIMEOUT = 3.0
#: Of a group in which a rank dies, which is found out long before.
LONG_TIMEOUT = 300.0
#: Survivors that take longer hang; less than the long timeout.
DEADLINE = 120.0
START_TIMEOUT = 60.0
OLD, NEW, LATER = 1, 2, 3


class Scenario(TypedDict):
    """Which rank of how many ends where, and how: ``exit``, ``kill`` or ``stop``.

    They meet in a ``file``, in a ``tcp`` store that rank 0 hosts, or in one of an ``agent`` as torchrun has it.
    """

    world: int
    victim: int
    operation: str
    step: str
    how: str
    store: str


class Reaper:
    """A plugin that ends this process when a step begins."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario = scenario
        self._folder = folder

    @hookimpl
    def shardckpt_event(self, event: Any) -> None:
        """End at the scenario's step."""
        here = (event.rank, event.operation, event.phase, event.state)
        if here == (self._scenario["victim"], self._scenario["operation"], self._scenario["step"], "start"):
            (self._folder / "ended").write_text(str(time.monotonic()))
            if self._scenario["how"] == "exit":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL if self._scenario["how"] == "kill" else signal.SIGSTOP)


def _rank(folder: Path, scenario: Scenario, rank: int) -> None:
    """One rank's life."""
    world, store = scenario["world"], _store(folder, scenario, rank)
    start = dt.timedelta(seconds=START_TIMEOUT)  # a loaded machine may take long to connect many processes
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=start)
    get_plugin_manager().register(Reaper(scenario, folder))
    dist.barrier()
    timeout = dt.timedelta(seconds=GROUP_TIMEOUT if scenario["how"] == "stop" else LONG_TIMEOUT)
    _set_pg_timeout(timeout, dist.group.WORLD)
    store.set_timeout(timeout)
    (folder / f"ready{rank}").touch()
    target = folder / "root" / "ckpt"
    kind, message = "", ""
    try:
        if scenario["operation"] == "save":
            dist_checkpointing.save(samples.state_dict(NEW, rank, world), target, overwrite=True)
        else:
            samples.load(target, rank, world)
    except Exception as exc:  # noqa: BLE001 - it is reported
        kind, message = type(exc).__name__, str(exc)
    (folder / f"outcome{rank}").write_text(json.dumps([kind, message, time.monotonic()]))


def _store(folder: Path, scenario: Scenario, rank: int) -> dist.Store:
    if scenario["store"] == "file":
        return dist.FileStore(str(folder / "store"), scenario["world"])
    if scenario["store"] == "agent":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    hosts = scenario["store"] == "tcp" and rank == 0
    port = _port(folder) if not hosts else 0
    store = dist.TCPStore("127.0.0.1", port, None, is_master=hosts, wait_for_workers=False)
    if hosts:
        _publish(folder, store)
    return store


def _be_agent(folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    _publish(folder, store)
    while True:
        signal.pause()


def _publish(folder: Path, store: dist.TCPStore) -> None:
    (folder / "new-port").write_text(str(store.port))
    (folder / "new-port").rename(folder / "port")


def _port(folder: Path) -> int:
    started = time.monotonic()
    while not (folder / "port").exists() and time.monotonic() < started + START_TIMEOUT:
        time.sleep(0.005)
    return int((folder / "port").read_text())


def _run(folder: Path, scenario: Scenario) -> dict[str, Any]:
    """What the surviving ranks raised, and what is on disk afterwards."""
    target = folder / "root" / "ckpt"
    dist_checkpointing.save(samples.state_dict(OLD), target)
    agents = [fork(lambda: _be_agent(folder))] if scenario["store"] == "agent" else []
    pids = [fork(lambda rank=rank: _rank(folder, scenario, rank)) for rank in range(scenario["world"])]
    others = [pid for rank, pid in enumerate(pids) if rank != scenario["victim"]]
    started = time.monotonic()
    while len(list(folder.glob("ready*"))) < scenario["world"] and time.monotonic() < started + START_TIMEOUT:
        time.sleep(0.005)
    ended = wait(others, DEADLINE)
    wait([pids[scenario["victim"]]], 0.0 if scenario["how"] == "stop" else DEADLINE)
    wait(agents, 0.0)
    outcomes = {p.name.removeprefix("outcome"): json.loads(p.read_text()) for p in folder.glob("outcome*")}
    died = float((folder / "ended").read_text())
    left = sorted(path.name for path in target.parent.iterdir())
    loaded = samples.load(target)
    state = next((version for version in (OLD, NEW) if not samples.differences(loaded, version)), 0)
    dist_checkpointing.save(samples.state_dict(LATER), target, overwrite=True)
    return {
        "hung": None in ended.values(),
        "outcomes": {rank: outcome[:2] for rank, outcome in outcomes.items()},
        "seconds": max((outcome[2] - died for outcome in outcomes.values()), default=0.0),
        "left": left,
        "state": state,
        "wrong_later": samples.differences(samples.load(target), LATER),
    }


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    scratch = Path(sys.argv[1]) / "warm"
    dist_checkpointing.save(samples.state_dict(OLD), scratch)
    samples.load(scratch)
    folder, scenarios = Path(sys.argv[1]), json.load(sys.stdin)
    for number in range(len(scenarios)):
        (folder / str(number) / "root").mkdir(parents=True)
    runs = [partial(_run, folder / str(number), scenario) for number, scenario in enumerate(scenarios)]
    # who waits for a stopped rank leaves the cores to others; where a rank dies all are busy up to the end
    reports: dict[int, Any] = {}
    for stops, at_a_time in ((True, 2), (False, 1)):
        numbers = [number for number, scenario in enumerate(scenarios) if (scenario["how"] == "stop") is stops]
        found = report_all([runs[number] for number in numbers], folder, at_a_time)
        reports.update(zip(numbers, found, strict=True))
    json.dump([reports[number] for number in range(len(scenarios))], sys.stdout)


if __name__ == "__main__":
    main()

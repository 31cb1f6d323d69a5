"""Program: let one rank of a group end or stop in the middle of a job, and say what the others raise.

``python -m tests.faults.deaths JOB FOLDER`` reads scenarios as JSON from standard input and prints what came of them.
A job is one of ``JOBS``. torch is imported once; the ranks of every scenario are forked.
"""

# ruff: noqa: D102 - Job says what its methods do
from __future__ import annotations

import datetime as dt
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardckpt import dist_checkpointing, hookimpl
from shardckpt.distributed.comm import Comm
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from shardckpt.plugins.manager import get_plugin_manager
from tests.faults import samples
from tests.faults.forks import fork, report_all, wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import NotRequired

#: Of a group in which a rank dies, which is found out long before.
LONG_TIMEOUT = 300.0
START_TIMEOUT = 60.0
OLD, NEW, LATER = 1, 2, 3


class Scenario(TypedDict):
    """Which rank of how many ends, and how: ``exit``, ``kill`` or ``stop``; with ``none``, its call fails.

    They meet in a ``file``, in a ``tcp`` store that rank 0 hosts, or in one of an ``agent`` as torchrun has it.
    """

    world: int
    victim: int
    how: str
    store: NotRequired[str]
    #: Of ``step``: ``save`` or ``load``, and its step in which the rank ends.
    operation: NotRequired[str]
    step: NotRequired[str]
    #: Of ``collective``: the ranks of the group, and after how many seconds each rank enters.
    members: NotRequired[list[int]]
    delays: NotRequired[list[float]]
    #: Of ``exchange``: how shards travel, in groups of what size.
    group: NotRequired[int]
    algorithm: NotRequired[str]


class Job:
    """What the ranks do.

    Args:
        folder: For all scenarios.
    """

    #: Of a group in which a rank stops, which is found out when it has passed.
    timeout = 3.0
    #: Survivors that take longer hang; less than the long timeout.
    deadline = 120.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, folder: Path) -> None:
        """Make what is there before a scenario."""

    def meet(self, scenario: Scenario, rank: int, timeout: dt.timedelta) -> Any:
        """Collective: make the group that the rank works in."""
        return dist.group.WORLD

    def act(self, folder: Path, scenario: Scenario, rank: int, group: Any) -> None:
        """Do a rank's part."""
        raise NotImplementedError

    def look(self, folder: Path) -> dict[str, Any]:
        """What else is reported of a scenario."""
        return {}


class StepJob(Job):
    """A save over a checkpoint, or a load, in one of whose steps the rank ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        dist_checkpointing.save(samples.state_dict(OLD), folder / "warm")
        samples.load(folder / "warm")

    def prepare(self, folder: Path) -> None:
        (folder / "root").mkdir()
        dist_checkpointing.save(samples.state_dict(OLD), folder / "root" / "ckpt")

    def act(self, folder: Path, scenario: Scenario, rank: int, group: Any) -> None:
        get_plugin_manager().register(Reaper(scenario, folder))
        target, world = folder / "root" / "ckpt", scenario["world"]
        if scenario["operation"] == "save":
            dist_checkpointing.save(samples.state_dict(NEW, rank, world), target, overwrite=True)
        else:
            samples.load(target, rank, world)

    def look(self, folder: Path) -> dict[str, Any]:
        target = folder / "root" / "ckpt"
        left = sorted(path.name for path in target.parent.iterdir())
        loaded = samples.load(target)
        state = next((version for version in (OLD, NEW) if not samples.differences(loaded, version)), 0)
        dist_checkpointing.save(samples.state_dict(LATER), target, overwrite=True)
        return {"left": left, "state": state, "wrong_later": samples.differences(samples.load(target), LATER)}


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
            _end(self._folder, self._scenario["how"])


class CollectiveJob(Job):
    """A collective of a smaller group, which its ranks enter at different times, and one not at all."""

    timeout = 6.0

    def meet(self, scenario: Scenario, rank: int, timeout: dt.timedelta) -> Any:
        """Make the group of the members."""
        return dist.new_group(scenario["members"], timeout)

    def act(self, folder: Path, scenario: Scenario, rank: int, group: Any) -> None:
        comm = Comm(group)
        comm.sync_errors()
        time.sleep(scenario["delays"][rank])
        if rank == scenario["victim"]:
            _end(folder, scenario["how"])
        with comm.collective_phase("meeting"):
            if rank == scenario["victim"]:
                comm._call(_fail)


class ExchangeJob(Job):
    """A fully parallel load, between whose rounds the rank ends."""

    timeout = 20.0
    deadline = 2 * timeout - 2  # less than two timeouts in a row

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        dist_checkpointing.save(self._state(), folder / "ckpt")
        dist_checkpointing.load(self._state(), folder / "ckpt")

    def meet(self, scenario: Scenario, rank: int, timeout: dt.timedelta) -> Any:
        """Make all groups; a group would not inherit the timeout."""
        size = scenario["group"]
        starts = range(0, scenario["world"], size)
        return [dist.new_group([*range(start, start + size)], timeout) for start in starts][rank // size]

    def act(self, folder: Path, scenario: Scenario, rank: int, group: Any) -> None:
        strategy = FullyParallelLoadStrategyWrapper(
            dist_checkpointing.get_default_load_sharded_strategy(self.folder / "ckpt"),
            group,
            exchange_algo=scenario["algorithm"],
            round_bytes=100_000,
        )
        if rank == scenario["victim"]:
            rounds = [lambda: None, partial(_end, folder, scenario["how"])]
            Comm.exchange = _after(Comm.exchange, rounds)  # type: ignore[method-assign]
            Comm.broadcast_tensors = _after(Comm.broadcast_tensors, rounds)  # type: ignore[method-assign]
        dist_checkpointing.load(self._state(rank), self.folder / "ckpt", strategy)

    def _state(self, rank: int = 0) -> dict[str, ShardedTensor]:
        names = [f"w{number}" for number in range(6)]
        return {name: ShardedTensor.from_rank_offsets(name, torch.ones(50_000), replica_id=rank) for name in names}


JOBS: dict[str, type[Job]] = {"step": StepJob, "collective": CollectiveJob, "exchange": ExchangeJob}


def _fail() -> None:
    raise RuntimeError("tensors of different sizes")


def _after(move: Any, rounds: list[Callable[[], None]]) -> Any:
    """A move of tensors before which the next of the functions is called, while there are any."""

    def moved(*args: Any) -> None:
        if rounds:
            rounds.pop(0)()
        move(*args)

    return moved


def _end(folder: Path, how: str) -> None:
    """End or stop this process, and leave the time; with ``none``, go on."""
    if how == "none":
        return
    (folder / "ended").write_text(str(time.monotonic()))
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def _be_rank(job: Job, folder: Path, scenario: Scenario, rank: int) -> None:
    store = _store(folder, scenario, rank)
    start = dt.timedelta(seconds=START_TIMEOUT)  # a loaded machine may take long to connect many processes
    dist.init_process_group("gloo", store=store, rank=rank, world_size=scenario["world"], timeout=start)
    timeout = dt.timedelta(seconds=job.timeout if scenario["how"] == "stop" else LONG_TIMEOUT)
    group = job.meet(scenario, rank, timeout)
    dist.barrier()
    _set_pg_timeout(timeout, dist.group.WORLD)
    store.set_timeout(timeout)
    (folder / f"ready{rank}").touch()
    if rank not in scenario.get("members", [rank]):
        return
    outcome: tuple[str, str, list[int]] = ("", "", [])
    try:
        job.act(folder, scenario, rank, group)
    except Exception as exc:  # noqa: BLE001 - it is reported
        outcome = (type(exc).__name__, str(exc), list(getattr(exc, "missing_ranks", [])))
    (folder / f"outcome{rank}").write_text(json.dumps([*outcome, time.monotonic()]))


def _store(folder: Path, scenario: Scenario, rank: int) -> dist.Store:
    kind = scenario.get("store", "file")
    if kind == "file":
        return dist.FileStore(str(folder / "store"), scenario["world"])
    if kind == "agent":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    hosts = kind == "tcp" and rank == 0
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
    _wait_for(folder, "port", 1)
    return int((folder / "port").read_text())


def _wait_for(folder: Path, pattern: str, count: int) -> None:
    """Wait until so many files are there, for some time."""
    started = time.monotonic()
    while len(list(folder.glob(pattern))) < count and time.monotonic() < started + START_TIMEOUT:
        time.sleep(0.005)


def _run(job: Job, folder: Path, scenario: Scenario) -> dict[str, Any]:
    """What the surviving ranks raised, the ranks that they name, and what is on disk afterwards."""
    job.prepare(folder)
    agents = [fork(lambda: _be_agent(folder))] if scenario.get("store") == "agent" else []
    pids = [fork(partial(_be_rank, job, folder, scenario, rank)) for rank in range(scenario["world"])]
    _wait_for(folder, "ready*", scenario["world"])
    ended = wait([pid for rank, pid in enumerate(pids) if rank != scenario["victim"]], job.deadline)
    wait([pids[scenario["victim"]]], 0.0 if scenario["how"] == "stop" else job.deadline)
    wait(agents, 0.0)
    found = {path.name.removeprefix("outcome"): json.loads(path.read_text()) for path in folder.glob("outcome*")}
    died = float((folder / "ended").read_text()) if scenario["how"] != "none" else 0.0
    return {
        "hung": None in ended.values(),
        "outcomes": {rank: outcome[:2] for rank, outcome in found.items()},
        "missing": {rank: outcome[2] for rank, outcome in found.items()},
        "seconds": max((outcome[3] - died for outcome in found.values()), default=0.0),
        **job.look(folder),
    }


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    folder, scenarios = Path(sys.argv[2]), json.load(sys.stdin)
    job = JOBS[sys.argv[1]](folder)
    runs = []
    for number, scenario in enumerate(scenarios):
        (folder / str(number)).mkdir()
        runs.append(partial(_run, job, folder / str(number), scenario))
    # who waits for a stopped rank leaves the cores to others; where a rank dies all are busy up to the end
    reports: dict[int, Any] = {}
    for stops, at_a_time in ((True, 2), (False, 1)):
        numbers = [number for number, scenario in enumerate(scenarios) if (scenario["how"] == "stop") is stops]
        found = report_all([runs[number] for number in numbers], folder, at_a_time)
        reports.update(zip(numbers, found, strict=True))
    json.dump([reports[number] for number in range(len(scenarios))], sys.stdout)


if __name__ == "__main__":
    main()

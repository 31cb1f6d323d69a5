"""Program: let one rank end or stop between two rounds of a fully parallel load, and say what the others raise.

``python -m tests.faults.exchange_deaths FOLDER`` reads scenarios as JSON from standard input and prints the outcomes.
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

from shardckpt import dist_checkpointing
from shardckpt.distributed.comm import Comm
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from tests.faults.forks import fork, report_all, wait

#: Of a group in which a rank stops, which is found out when it has passed; and of the others, in which none passes.
GROUP_TIMEOUT, LONG_TIMEOUT = 20.0, 300.0
#: Survivors that take longer hang: less than two timeouts in a row.
DEADLINE = 2 * GROUP_TIMEOUT - 2
START_TIMEOUT = 60.0


class Scenario(TypedDict):
    """Which rank of how many ends how: ``kill`` or ``stop``; and how shards travel in groups of what size."""

    world: int
    group: int
    victim: int
    algorithm: str
    how: str


def _state(rank: int = 0) -> dict[str, ShardedTensor]:
    names = [f"w{number}" for number in range(6)]
    return {name: ShardedTensor.from_rank_offsets(name, torch.ones(50_000), replica_id=rank) for name in names}


def _end_in_the_second_round(how: str) -> None:
    """Make this process's second move of tensors its last."""
    rounds = []

    def ending(move: Any) -> Any:
        def moved(*args: Any) -> None:
            rounds.append(1)
            if len(rounds) == 2:
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            move(*args)

        return moved

    Comm.exchange = ending(Comm.exchange)  # type: ignore[method-assign]
    Comm.broadcast_tensors = ending(Comm.broadcast_tensors)  # type: ignore[method-assign]


def _rank(folder: Path, scenario: Scenario, rank: int) -> None:
    """One rank's life."""
    timeout = dt.timedelta(seconds=GROUP_TIMEOUT if scenario["how"] == "stop" else LONG_TIMEOUT)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=scenario["world"],
        timeout=timeout,
    )
    size = scenario["group"]
    starts = range(0, scenario["world"], size)
    groups = [dist.new_group([*range(start, start + size)], timeout) for start in starts]  # it would not inherit it
    directory = folder.parent / "ckpt"
    strategy = FullyParallelLoadStrategyWrapper(
        dist_checkpointing.get_default_load_sharded_strategy(directory),
        groups[rank // size],
        exchange_algo=scenario["algorithm"],
        round_bytes=100_000,
    )
    dist.barrier()
    (folder / f"ready{rank}").touch()
    if rank == scenario["victim"]:
        _end_in_the_second_round(scenario["how"])
    kind, message = "", ""
    try:
        dist_checkpointing.load(_state(rank), directory, strategy)
    except Exception as exc:  # noqa: BLE001 - it is reported
        kind, message = type(exc).__name__, str(exc)
    (folder / f"outcome{rank}").write_text(json.dumps([kind, message]))


def _run(folder: Path, scenario: Scenario) -> dict[str, Any]:
    """What the surviving ranks raised."""
    pids = [fork(lambda rank=rank: _rank(folder, scenario, rank)) for rank in range(scenario["world"])]
    started = time.monotonic()
    while len(list(folder.glob("ready*"))) < scenario["world"] and time.monotonic() < started + START_TIMEOUT:
        time.sleep(0.005)
    ended = wait([pid for rank, pid in enumerate(pids) if rank != scenario["victim"]], DEADLINE)
    wait([pids[scenario["victim"]]], 0.0 if scenario["how"] == "stop" else DEADLINE)
    outcomes = {path.name.removeprefix("outcome"): json.loads(path.read_text()) for path in folder.glob("outcome*")}
    return {"hung": None in ended.values(), "outcomes": outcomes}


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    dist_checkpointing.save(_state(), base / "ckpt")
    dist_checkpointing.load(_state(), base / "ckpt")
    runs = []
    for number, scenario in enumerate(json.load(sys.stdin)):
        (base / str(number)).mkdir()
        runs.append(partial(_run, base / str(number), scenario))
    json.dump(report_all(runs, base, 2), sys.stdout)


if __name__ == "__main__":
    main()

"""Program: fail at each request of a save of 2 ranks to S3, or kill them there, and say what remains.

``python -m tests.remote.request_faults FOLDER PROXY FAULT,...`` prints a line of JSON for each request and fault; the
environment names the proxy as the store's endpoint. torch is imported once; what uses a client is a fork.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.engine import open_folder
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage import list_objects
from tests.faults.forks import fork, wait
from tests.remote import jobs
from tests.remote.fault_proxy import FaultProxy
from tests.remote.servers import BUCKET, request

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = 2
_GROUP_TIMEOUT = 20.0
#: Elements of a rank's shard: two parts of 5 MiB and less.
_ELEMENTS = 6 << 18
FIRST, SECOND = 1.0, 2.0


def main(folder: Path, proxy: FaultProxy, faults: list[str]) -> None:
    """Count the requests, then fail at each of them."""
    torch.set_num_threads(1)
    local = str(folder / "warm")
    _save(local, FIRST)  # what a first save and load import, the forks have
    _check(local, FIRST)
    # more than were counted: a save after a failed request sends others
    count = len(_run(folder, proxy, "", 0)["requests"])
    for fault in faults:
        for number in range(1, count + 1):
            report = _run(folder, proxy, fault, number)
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()


def _run(folder: Path, proxy: FaultProxy, fault: str, number: int) -> dict[str, Any]:
    name = f"{fault or 'none'}-{number}"
    place, url = folder / name, f"s3://{BUCKET}/{name}/step-1"
    place.mkdir()
    # stopped, until the proxy knows whom to kill
    saves = [fork(lambda rank=rank: _save_as_rank(place, url, rank), stopped=True) for rank in range(WORLD)]  # type: ignore[misc]
    proxy.fail(fault, number, pids=saves)
    for pid in saves:
        os.kill(pid, signal.SIGCONT)
    ended = wait(saves, 60)
    requests = proxy.requests()
    proxy.work()
    uploads = request(proxy.endpoint, "GET", f"{BUCKET}?uploads").count(f"<Key>{name}/")
    return {
        "fault": fault,
        "number": number,
        "requests": requests,
        "hung": None in ended.values(),
        "killed": sum(bool(status and os.WIFSIGNALED(status)) for status in ended.values()),
        "uploads": uploads,
        "errors": [json.loads(path.read_text()) for path in sorted(place.glob("rank*"))],
        "after": _in_fork(place, lambda: _look(url)),
    }


def _look(url: str) -> dict[str, Any]:
    """What the save left, what a load of it says, and whether the place can be saved to."""
    folder = open_folder(url, get_plugin_manager())
    assert folder is not None
    left = sorted(list_objects(folder))
    load = jobs.error_of(_check, url, FIRST)
    again = jobs.error_of(_save, url, SECOND, overwrite=True)
    return {
        "left": left,
        "load": load,
        "again": again,
        "second": jobs.error_of(_check, url, FIRST if again[0] else SECOND),
        "kept": [name for name in list_objects(folder) if name.startswith(".shardckpt")],
    }


def _save_as_rank(place: Path, url: str, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'group'}",
        rank=rank,
        world_size=WORLD,
        timeout=dt.timedelta(seconds=_GROUP_TIMEOUT),
    )
    error = jobs.error_of(_save, url, FIRST)
    (place / f"rank{rank}").write_text(json.dumps(error))


def _state(value: float) -> dict[str, Any]:
    rank, world = jobs.whereabouts()
    shard = torch.full((WORLD * _ELEMENTS // world,), value)
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", shard, (0, rank, world)),
        "object": ShardedObject("object", {"value": value}, (1,), (0,), replica_id=rank),
        "iteration": int(value),
    }


def _save(url: str, value: float, **options: Any) -> None:
    dc.save(_state(value), url, **options)


def _check(url: str, value: float) -> None:
    """Every byte is of the save of that value."""
    loaded = dc.load(_state(-1.0), url)
    if not bool((loaded["weight"] == value).all()) or loaded["object"] != {"value": value}:
        raise AssertionError(f"a mixture: {loaded['weight'].unique()}, {loaded['object']}")
    if loaded["iteration"] != int(value):
        raise AssertionError(f"a mixture: iteration {loaded['iteration']}")


def _in_fork(place: Path, function: Callable[[], dict[str, Any]]) -> Any:
    said = place / "after"
    wait([fork(lambda: said.write_text(json.dumps(function())) and None)], 60)
    return json.loads(said.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), FaultProxy(sys.argv[2]), sys.argv[3].split(","))

"""Program: fail at each request of a save of 2 ranks to S3, or kill them there, and say what remains.

``python -m tests.remote.request_faults FOLDER PROXY FAULT,... new`` prints a line of JSON for each request and fault;
the environment names the proxy as the store's endpoint. ``overwrite-first``: of a save over a first save;
``overwrite``: over one that has overwritten another; a number after that: of each so many requests only one. torch is
imported once; what uses a client is a fork.
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
from shardckpt.engine import locate
from shardckpt.engine.pruning import prune_leftovers
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.storage.abilities import on_store
from shardckpt.storage.remote import list_objects
from tests.faults.forks import fork, wait
from tests.remote import jobs
from tests.remote.fault_proxy import FaultProxy
from tests.remote.servers import BUCKET, request
from tests.states import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = 2
_GROUP_TIMEOUT = 20.0
#: Elements of a rank's shard: two parts of 5 MiB and less.
_ELEMENTS = 6 << 18
FIRST, SECOND = 1.0, 2.0
#: What is at the URL before an overwrite is saved.
OLD = 0.0


def main(folder: Path, proxy: FaultProxy, faults: list[str], case: str, step: int = 1) -> None:
    """Count the requests, then fail at each of them."""
    torch.set_num_threads(1)
    local = str(folder / "warm")
    _save(local, FIRST)  # what a first save and load import, the forks have
    _check(local, FIRST)
    # more than were counted: a save after a failed request sends others
    count = len(_run(folder, proxy, "", 0, case)["requests"])
    for fault in faults:
        for number in range(1, count + 1, step):
            report = _run(folder, proxy, fault, number, case)
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()


def _run(folder: Path, proxy: FaultProxy, fault: str, number: int, case: str) -> dict[str, Any]:
    name = f"{fault or 'none'}-{number}"
    place, url = folder / name, f"s3://{BUCKET}/{name}/step-1"
    place.mkdir()
    if case != "new":
        wait([fork(lambda: _save_old(url, twice=case == "overwrite"))], 60)
    # stopped, until the proxy knows whom to kill
    saves = [
        fork(lambda rank=rank: _save_as_rank(place, url, rank, overwrite=case != "new"), stopped=True)
        for rank in range(WORLD)
    ]  # type: ignore[misc]
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
        "overwrites": case != "new",
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
    objects = list_objects(folder)
    left = sorted(objects)
    pruned = _prune_copy(url, objects)
    load, old = jobs.error_of(_check, url, FIRST), jobs.error_of(_check, url, OLD)
    again = jobs.error_of(_save, url, SECOND, overwrite=True)
    return {
        "left": left,
        "pruned": pruned,
        "load": load,
        "old": old,
        "again": again,
        "second": jobs.error_of(_check, url, FIRST if again[0] else SECOND),
        "kept": [name for name in list_objects(folder) if ".shardckpt" in name],
        "rest": sorted(list_objects(folder)),
    }


def _prune_copy(url: str, objects: dict[str, int]) -> dict[str, Any]:
    """What a prune of a copy finds, and what it leaves."""
    copy = url.replace("/step-1", "/copy/step-1")
    old, new = locate(url, get_plugin_manager()), on_store(locate(copy, get_plugin_manager()))
    assert new is not None
    for name, size in objects.items():
        (new / name).write((on_store(old) / name).read_range(0, size))  # type: ignore[operator]
    found = prune_leftovers(copy) if objects else []
    return {
        "found": [[result.nbytes, result.kept, result.error] for result in found],
        "rest": sorted(list_objects(new.folder)),
        "load": jobs.error_of(_check, copy, FIRST),
        "old": jobs.error_of(_check, copy, OLD),
    }


def _save_old(url: str, *, twice: bool) -> None:
    """Save what an overwrite replaces: a first save, or the generation that has replaced one."""
    for _ in range(1 + twice):
        _save(url, OLD, overwrite=True)


def _save_as_rank(place: Path, url: str, rank: int, *, overwrite: bool) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'group'}",
        rank=rank,
        world_size=WORLD,
        timeout=dt.timedelta(seconds=_GROUP_TIMEOUT),
    )
    error = jobs.error_of(_save, url, FIRST, overwrite=overwrite)
    (place / f"rank{rank}").write_text(json.dumps(error))


def _state(value: float) -> dict[str, Any]:
    rank, world = rank_and_size()
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
    main(Path(sys.argv[1]), FaultProxy(sys.argv[2]), sys.argv[3].split(","), sys.argv[4], *map(int, sys.argv[5:]))

"""Program: kill a save to a store at every upload, before and after it is done, and say what remains.

``python -m tests.remote.killer FOLDER WORLD_SIZE flat`` prints a line of JSON for each kill; ``tree``: of a save whose
files are in folders. torch is imported once; every save and load is a fork.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt.commit.leftovers import find_spool_folder
from tests.faults.forks import fork, wait
from tests.remote import jobs
from tests.remote.store import Store
from tests.trees import LoadTree, SaveTree

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP_TIMEOUT = 3.0
OLD, NEW = 1.0, 2.0
#: How a checkpoint is saved and checked, by what its files are.
_CALLS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "flat": (jobs.save, jobs.check),
    "tree": (
        functools.partial(jobs.save, sharded_strategy=SaveTree()),
        functools.partial(jobs.check, sharded_strategy=LoadTree()),
    ),
}


def main(folder: Path, world: int, files: str) -> None:
    """Kill the k-th upload for every k, until there are no more."""
    torch.set_num_threads(1)
    warm = Store(folder / "warm")  # what a first save and load import, the forks have
    save, check = _CALLS[files]
    save(warm.url, OLD)
    check(warm.url, OLD)
    for how in ("kill-before", "kill-after"):
        number, killed = 0, True
        while killed:
            number += 1
            report = _one(folder / f"{how}-{number}", world, number, how, files)
            killed = report["killed"]
            sys.stdout.write(json.dumps(report) + "\n")


def _one(place: Path, world: int, number: int, how: str, files: str) -> dict[str, Any]:
    save, check = _CALLS[files]
    place.mkdir()
    store = Store(place / "store")
    store.fails("put", number, number, how)
    saves = [fork(lambda rank=rank: _save(place, store, rank, world, save)) for rank in range(world)]  # type: ignore[misc]
    ended = wait(saves, 30)
    store.works()
    spools = [_spools()]
    left = sorted(path.relative_to(store.objects).as_posix() for path in store.objects.rglob("*") if path.is_file())
    load = _outcome(place, lambda: check(store.url, OLD))
    refused = _outcome(place, lambda: save(store.url, NEW))
    again = _outcome(place, lambda: save(store.url, NEW, overwrite=True))
    spools.append(_spools())
    after = _outcome(place, lambda: check(store.url, NEW))
    return {
        "number": number,
        "how": how,
        "files": files,
        "hung": None in ended.values(),
        "killed": any(status and os.WIFSIGNALED(status) for status in ended.values()),
        "left": left,
        "spools": spools,
        "load": load,
        "refused": refused,
        "again": again,
        "after": after,
    }


def _spools() -> list[str]:
    """The spool directories of all processes."""
    return sorted(path.name for path in find_spool_folder().glob("shardckpt-spool-*"))


def _save(place: Path, store: Store, rank: int, world: int, save: Callable[..., None]) -> None:
    if world > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place / 'group'}",
            rank=rank,
            world_size=world,
            timeout=dt.timedelta(seconds=GROUP_TIMEOUT),
        )
    jobs.error_of(save, store.url, OLD)


def _outcome(place: Path, action: Callable[[], None]) -> list[str]:
    """Class and text of what a fork that acts raises."""
    said = place / "said"
    wait([fork(lambda: said.write_text(json.dumps(jobs.error_of(action))) and None)], 30)
    return json.loads(said.read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

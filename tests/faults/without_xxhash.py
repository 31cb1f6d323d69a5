"""Program: one of several ranks, of which some have no xxhash, uses a checkpoint, and prints what came of it.

``python -m tests.faults.without_xxhash VERBS DIRECTORY STORE RANK HAVE...``: verbs stand between commas and are done
one after the other; a 1 or 0 for each rank says whether it has xxhash; one rank has no group.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest import Record
from shardckpt.storage.digest import XXH3
from tests import programs
from tests.faults import samples
from tests.names import RECORD

if TYPE_CHECKING:
    from tests.backends import Backend
    from tests.ranks import Ranks
pytest.importorskip("xxhash")

import datetime as dt
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 1
_GROUP_TIMEOUT = 8.0


def _save(target: Path, _rank: int, _world: int) -> None:
    from tests.faults import samples

    samples.save(target, VERSION)


def _save_in_the_background(target: Path, rank: int, world: int) -> None:
    from shardckpt import dist_checkpointing
    from shardckpt.async_save import AsyncCallsQueue
    from tests.faults import samples

    with AsyncCallsQueue(persistent=True) as queue:
        state = samples.state_dict(VERSION, rank, world)
        queue.schedule_async_request(dist_checkpointing.save(state, target, async_sharded_save=True))
        queue.maybe_finalize_async_calls(blocking=True)


def _load(target: Path, _rank: int, _world: int) -> None:
    from tests.faults import samples

    if wrong := samples.find_wrong(target, VERSION):
        raise ValueError(f"wrong: {wrong}")


def _verify(target: Path, _rank: int, _world: int) -> None:

    faults = [result.fault for result in verify_checkpoint(target) if result.fault]
    if faults:
        raise ValueError("; ".join(faults))


def _remove(target: Path, _rank: int, _world: int) -> None:
    from shardckpt import dist_checkpointing

    dist_checkpointing.remove_sharded_tensors(target, "bias")


VERBS: dict[str, Callable[[Path, int, int], None]] = {
    "save": _save,
    "save in the background": _save_in_the_background,
    "load": _load,
    "verify": _verify,
    "remove": _remove,
}


def _rank(verbs: str, target: Path, store: str, rank: int, world: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from shardckpt.errors import CheckpointingException

    torch.set_num_threads(1)
    if world > 1:
        timeout = dt.timedelta(seconds=_GROUP_TIMEOUT)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    error, family = "", True
    try:
        for verb in verbs.split(","):
            VERBS[verb](target, rank, world)
    except Exception as exc:  # noqa: BLE001 - it is reported
        error, family = f"{type(exc).__name__}: {exc}", isinstance(exc, CheckpointingException)
    if world > 1:
        dist.destroy_process_group()
    return {"error": error, "family": family, "has it": sys.modules.get("xxhash") is not None}


def main() -> None:
    """Be a rank, and print what came of it."""
    verbs, target, store, rank, *have = sys.argv[1:]
    if "xxhash" in sys.modules:
        raise SystemExit("xxhash is imported already: that it is missing would not be noticed")
    if have[int(rank)] == "0":
        sys.modules["xxhash"] = None  # type: ignore[assignment] # as if it were not installed
    json.dump(_rank(verbs, Path(target), store, int(rank), len(have)), sys.stdout)


MODULE = "tests.faults.without_xxhash"


def outcomes(verb: str, target: Path, *have: int) -> list[dict[str, Any]]:
    """What every rank reports; ``have`` says which of them have xxhash."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            programs.start(
                "", verb, str(target), f"{folder}/group", str(rank), *map(str, have), module=MODULE, cwd=programs.ROOT
            )
            for rank in range(len(have))
        ]
        ended = [program.communicate(60) for program in started]
    assert [program.returncode for program in started] == [0] * len(have), ended
    found: list[dict[str, Any]] = [json.loads(out) for out, _ in ended]
    assert all(outcome["family"] for outcome in found), found
    return found


def algorithm(target: Path) -> str:
    """Of a checkpoint's digests."""
    return Record.parse((target / RECORD).read_bytes()).digest_algorithm


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Path:
    """A checkpoint with digests by xxhash."""
    target = tmp_path_factory.mktemp("saved") / "ckpt"
    ranks.run(2, samples.save, str(target), 1)
    assert algorithm(target) == XXH3
    return target


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


if __name__ == "__main__":
    main()

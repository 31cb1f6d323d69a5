"""Program: one of several ranks, of which some have no xxhash, uses a checkpoint, and prints what came of it.

``python -m tests.faults.without_xxhash VERBS DIRECTORY STORE RANK HAVE...``: verbs stand between commas and are done
one after the other; a 1 or 0 for each rank says whether it has xxhash; one rank has no group.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from shardckpt.maintenance.verify import verify_checkpoint

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


if __name__ == "__main__":
    main()

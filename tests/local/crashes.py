"""Program: end a rank at each step on disk of a save of local checkpoints, and say what is there for a new group.

``python -m tests.local.crashes FOLDER STEP`` prints a list of reports as JSON, of each STEP-th place. torch is imported
once, ranks are forked.
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

from shardckpt.errors import CommunicationError
from shardckpt.local import CliqueReplication, LocalCheckpointManager, TensorAwareStateDict, save_local
from shardckpt.local.parts import PartId
from shardckpt.mapping import ShardedTensor
from tests.faults.forks import fork, wait

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP_TIMEOUT = 5.0
DEADLINE = 60.0
WORLD, VICTIM = 2, 1
#: What changes a disk; the victim ends before the n-th of them.
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def _values(step: int, rank: int) -> torch.Tensor:
    return torch.arange(1000) + 10000 * step + 5000 * rank


def _part(step: int, rank: int) -> TensorAwareStateDict:
    shard = ShardedTensor.from_rank_offsets(f"w{rank}", _values(step, rank))
    return TensorAwareStateDict.from_state_dict({"w": shard}, "atomic")[0]


class _End:
    """Ends this process before the n-th change of the disk."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, event: str, _: Any) -> None:
        if event in CHANGES:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


def _in_group(folder: Path, name: str, life: Callable[[int, LocalCheckpointManager], Any]) -> list[Any]:
    """What each rank of a new group of forked ranks says; None for one that was killed."""
    pids = [fork(lambda rank=rank: _rank(folder, name, rank, life)) for rank in range(WORLD)]
    wait(pids, DEADLINE)
    said = [folder / f"{name}-{rank}" for rank in range(WORLD)]
    return [json.loads(path.read_text()) if path.exists() else None for path in said]


def _rank(folder: Path, name: str, rank: int, life: Callable[[int, LocalCheckpointManager], Any]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / name}.store",
        rank=rank,
        world_size=WORLD,
        timeout=dt.timedelta(seconds=GROUP_TIMEOUT),
    )
    dist.barrier()
    manager = LocalCheckpointManager(folder / f"node{rank}", CliqueReplication(1, WORLD))
    (folder / f"{name}-{rank}").write_text(json.dumps(life(rank, manager)))


def _crashing(rank: int, manager: LocalCheckpointManager, number: int) -> str:
    """Save two steps; the victim ends in the midst of the second."""
    manager.save(_part(1, rank), 1)
    if rank == VICTIM:
        sys.addaudithook(_End(number))
    try:
        manager.save(_part(2, rank), 2)
        dist.barrier()  # whoever is through waits for the others
    except (CommunicationError, RuntimeError) as exc:
        return type(exc).__name__
    return ""


def _after(rank: int, manager: LocalCheckpointManager) -> tuple[int | None, bool, list[tuple[int, int]]]:
    """The latest step, whether what loads is that, and what is there after the next save."""
    latest = manager.find_latest()
    (found,) = manager.load().tensors
    manager.save(_part(3, rank), 3)
    root = Path(manager._folder.root)
    parts = [PartId.parse(path.name) for path in root.iterdir()]
    names = sorted((part.save.step, part.rank) if part else (-1, -1) for part in parts)
    return latest, latest is not None and torch.equal(found, _values(latest, rank)), names


def main() -> None:
    """Print the reports, until the victim survives."""
    torch.set_num_threads(1)
    base, step = Path(sys.argv[1]), int(sys.argv[2])
    save_local(_part(1, 0), base / "warm")  # plugins are loaded once, and not in the midst of a crash
    reports: list[dict[str, Any]] = []
    for number in range(1, 100, step):
        folder = base / str(number)
        folder.mkdir()
        crashed = _in_group(folder, "crashing", lambda rank, manager, number=number: _crashing(rank, manager, number))
        reports.append({"crashed": crashed, "after": _in_group(folder, "after", _after)})
        if crashed[VICTIM] is not None:
            break
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()

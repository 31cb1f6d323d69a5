"""The demo from start to end: a group that saves, then groups that load and go on."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from shardckpt.demo.group import run_ranks
from shardckpt.demo.job import Job, RankResult
from shardckpt.demo.outcome import Outcome, ranks
from shardckpt.errors import StorageError
from shardckpt.manifest import RECORD_LIMIT, RECORD_NAME, Record
from shardckpt.storage.filesystem import naming, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SAVER, *_LOADERS = 4, 2, 1
_MORE_STEPS = 8
_TIME_LIMIT = 300.0  # seconds for all groups together


def run_demo(directory: str | None, steps: int, say: Callable[[str], None]) -> Outcome:
    """Train, save with 4 ranks, load with 2 and with 1, and train on.

    Args:
        directory: Where the checkpoint and the ranks' logs stay: absent or empty; by default they are removed.
        steps: Training steps before the checkpoint.
        say: Prints a line of progress.

    Raises:
        CheckpointingException: something failed; whether the groups agree is for the caller to check.
    """
    start = time.monotonic()
    with _workplace(directory) as place:
        say(f"shardckpt {version('shardckpt')}, torch {version('torch')}, {os.cpu_count()} cores; work in {place}")
        groups: dict[int, list[RankResult]] = {}
        for world_size in (_SAVER, *_LOADERS):
            groups[world_size] = _run_group(world_size, steps, place, start, say)
        record = Record.model_validate_json(read_file(place / "checkpoint" / RECORD_NAME, RECORD_LIMIT))
    return Outcome(groups, record, steps)


def _run_group(world_size: int, steps: int, place: Path, start: float, say: Callable[[str], None]) -> list[RankResult]:
    def progress(text: str) -> None:
        say(f"{time.monotonic() - start:5.1f} s  {ranks(world_size)}: {text}")

    kind = "FSDP2, gloo" if world_size > 1 else "a plain model, no process group"
    progress(f"starting ({kind})")
    jobs = [
        Job(
            rank=rank,
            world_size=world_size,
            seed=world_size,
            checkpoint=str(place / "checkpoint"),
            saves=world_size == _SAVER,
            steps=steps,
            more_steps=_MORE_STEPS,
            rendezvous=str(place / f"rendezvous-{world_size}"),
        )
        for rank in range(world_size)
    ]
    return run_ranks(jobs, place, start + _TIME_LIMIT, progress)


@contextmanager
def _workplace(directory: str | None) -> Iterator[Path]:
    """A directory of our own: the caller's, which must be empty, or a temporary one."""
    if directory is None:
        with TemporaryDirectory(prefix="shardckpt-demo-") as name:
            yield Path(name)
        return
    place = Path(directory).absolute()
    with naming("create the directory", place):
        place.mkdir(parents=True, exist_ok=True)
        occupied = any(place.iterdir())
    if occupied:
        raise StorageError(f"{place} is not empty: give --dir a directory that is new or empty")
    yield place


__all__ = ["run_demo"]

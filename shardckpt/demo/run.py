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
from shardckpt.demo.job import Job, Layout, RankResult
from shardckpt.demo.outcome import Outcome
from shardckpt.errors import StorageError
from shardckpt.manifest import RECORD_LIMIT, RECORD_NAME, Record
from shardckpt.storage import naming, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: The groups of the demo: the first saves.
DENSE = (Layout(4), Layout(2), Layout(1))
#: The same for a model with experts.
EXPERTS = (Layout(2, ep=2), Layout(1, ep=4), Layout(2, ep=1), Layout(1, ep=1))

_MORE_STEPS = 8
_TIME_LIMIT = 300.0  # seconds for all groups together


def run_demo(directory: str | None, steps: int, layouts: Sequence[Layout], say: Callable[[str], None]) -> Outcome:
    """Train and save in one layout, load in others, and train on.

    Args:
        directory: Where the checkpoint and the ranks' logs stay: absent or empty; by default they are removed.
        steps: Training steps before the checkpoint.
        layouts: Of the group that saves, then of those that load.
        say: Prints a line of progress.

    Raises:
        CheckpointingException: something failed; whether the groups agree is for the caller to check.
    """
    start = time.monotonic()
    with _workplace(directory) as place:
        say(f"shardckpt {version('shardckpt')}, torch {version('torch')}, {os.cpu_count()} cores; work in {place}")
        groups: dict[Layout, list[RankResult]] = {}
        for number, layout in enumerate(layouts):
            groups[layout] = _run_group(number, layout, steps, place, start, say)
        record = Record.model_validate_json(read_file(place / "checkpoint" / RECORD_NAME, RECORD_LIMIT))
    return Outcome(groups, record, steps)


def _run_group(
    number: int, layout: Layout, steps: int, place: Path, start: float, say: Callable[[str], None]
) -> list[RankResult]:
    def progress(text: str) -> None:
        say(f"{time.monotonic() - start:5.1f} s  {layout}: {text}")

    progress(f"starting ({'FSDP2, gloo' if layout.world_size > 1 else 'a plain model, no process group'})")
    jobs = [
        Job(
            rank=rank,
            layout=layout,
            seed=number,
            checkpoint=str(place / "checkpoint"),
            saves=number == 0,
            steps=steps,
            more_steps=_MORE_STEPS,
            rendezvous=str(place / f"rendezvous-{number}"),
        )
        for rank in range(layout.world_size)
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


__all__ = ["DENSE", "EXPERTS", "run_demo"]

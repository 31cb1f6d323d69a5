"""When the phases of a save began and ended on each rank, as the record keeps them."""

from __future__ import annotations

import math
import struct
import time
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.manifest.models import SaveTimings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.storage.writer import WriteTimes

#: Ranks whose times the record has, at most: they take 2 KB then, and the spread covers the others.
MOST_RANKS = 64
#: Digits of a second that are kept.
_DIGITS = 4
#: Begin and end of plan, stage and write, seconds of sync, begin of commit; bytes. As bytes: a rank sends 40 of them
#: along with the records of its files.
_PACKED = struct.Struct("<8fq")


class _Times(NamedTuple):
    """A rank's times in seconds, from the moment that all ranks share; NaN for a phase that it did not have."""

    plan: float
    planned: float
    stage: float
    staged: float
    write: float
    written: float
    synced: float
    ready: float
    nbytes: int


class Timeline:
    """When the phases of a save began and ended on this rank, by ``time.perf_counter``.

    All processes of a host share that clock, so that the times of a worker process are comparable.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._shared = began
        self._planned = self._stage = self._staged = math.nan
        self._writing: WriteTimes | None = None

    def align(self) -> None:
        """Note the end of a collective: it is the same moment on all ranks, whose clocks may differ."""
        self._shared = time.perf_counter()

    def end_planning(self) -> None:
        """Note that a background save is planned; it writes later. A foreground save plans until it writes."""
        self._planned = time.perf_counter()

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Measure the block as the copy of the tensors for a background save."""
        self._stage = time.perf_counter()
        yield
        self._staged = time.perf_counter()

    def add_writing(self, times: WriteTimes) -> None:
        """Note when the rank wrote its files."""
        self._writing = times

    @property
    def is_background(self) -> bool:
        """Whether the save wrote behind the training."""
        return not math.isnan(self._planned)

    def pack(self, ready: float, nbytes: int) -> bytes:
        """Return the times for the main rank; empty if the writing was not noted, as where other programs do it.

        ``ready`` is when the rank had written all, and began to commit.
        """
        if self._writing is None:
            return b""
        began, ended, synced = self._writing
        write, written = (began, ended) if began else (math.nan, math.nan)
        planned = self._planned if self.is_background else write if began else ready
        moments = [self._began, planned, self._stage, self._staged, write, written]
        since = [moment - self._shared for moment in moments]
        return _PACKED.pack(*since, synced if began else math.nan, ready - self._shared, nbytes)

    def now(self) -> float:
        """Return the seconds since the moment that all ranks share."""
        return time.perf_counter() - self._shared


def gather_timings(packed: Sequence[bytes], timeline: Timeline) -> SaveTimings | None:
    """Return the times of all ranks for the record, packed in rank order; None if some rank has none.

    The timeline is the main rank's; its time is the end of the commit, as far as the record can have it.
    """
    if not all(packed):
        return None
    return make_timings([_Times(*_PACKED.unpack(data)) for data in packed], timeline.now(), timeline.is_background)


def make_timings(times: Sequence[_Times], committed: float, background: bool) -> SaveTimings:
    """Return the times of ranks, in rank order, from the moment at which the first one began.

    ``committed`` is when the record was made.
    """
    zero = min(rank.plan for rank in times)
    spans = [
        {
            "plan": (rank.plan - zero, rank.planned - rank.plan),
            "stage": (rank.stage - zero, rank.staged - rank.stage),
            "write": (rank.write - zero, rank.written - rank.write),
            "sync": (rank.written - zero - rank.synced, rank.synced),
            "commit": (rank.ready - zero, max(committed - rank.ready, 0.0)),
        }
        for rank in times
    ]
    slowest = sorted(range(len(times)), key=lambda rank: -_number(times[rank].written, -math.inf))
    ranks = sorted({0, *slowest[: MOST_RANKS - 1]}) if len(times) > MOST_RANKS else list(range(len(times)))
    phases = [phase for phase in spans[0] if any(not math.isnan(span[phase][1]) for span in spans)]
    return SaveTimings(
        background=background,
        ranks=tuple(ranks),
        nbytes=tuple(times[rank].nbytes for rank in ranks),
        start={phase: tuple(_rounded(spans[rank][phase][0]) for rank in ranks) for phase in phases},
        seconds={phase: tuple(_rounded(spans[rank][phase][1]) for rank in ranks) for phase in phases},
        spread={phase: _spread([span[phase][1] for span in spans]) for phase in phases},
    )


def _spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    known = [value for value in seconds if not math.isnan(value)]
    low, middle, high = (round(value, _DIGITS) for value in (min(known), median(known), max(known)))
    return low, middle, high


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, _DIGITS)


def _number(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value

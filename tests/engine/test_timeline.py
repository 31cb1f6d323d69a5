"""Timings of a save."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.engine.timeline import MOST_RANKS, _Times, make_timings
from shardckpt.manifest import SaveTimings
from shardckpt.mapping import ShardedTensor
from tests.backends import Backend, both_in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _read_timings(path: Path) -> SaveTimings:
    with dc.open_checkpoint(path) as checkpoint:
        assert checkpoint.record is not None
        found = checkpoint.record.timings
    assert found is not None
    return found


def _state() -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}


@both_in_proof
def test_a_save_keeps_when_it_did_what(backend: Backend, tmp_path: Path) -> None:
    """A foreground save has the phases in their order, from time 0 on, with the bytes of the rank's files."""
    dc.save(_state(), tmp_path / "c")
    found = _read_timings(tmp_path / "c")
    assert (found.background, found.ranks) == (False, (0,))
    assert found.nbytes[0] >= 4000
    begins = [found.start[phase][0] for phase in ("plan", "write", "commit")]
    assert begins[0] == 0
    assert begins == sorted(begins)
    assert found.seconds.keys() == {"plan", "write", "sync", "commit"}


@both_in_proof
def test_a_background_save_keeps_when_it_did_what(backend: Backend, tmp_path: Path) -> None:
    """A background save has the copy of its tensors, too, and the times of the thread or process that wrote."""
    queue = AsyncCallsQueue()
    queue.schedule_async_request(dc.save(_state(), tmp_path / "c", async_sharded_save=True))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    found = _read_timings(tmp_path / "c")
    assert found.background
    begins = [found.start[phase][0] for phase in ("plan", "stage", "write", "commit")]
    assert begins == sorted(begins)


def _save_on_rank(path: Path) -> None:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, dist.get_rank(), 2))}, path)


def test_every_rank_has_a_row(ranks: Ranks, tmp_path: Path) -> None:
    """The times of all ranks travel with the records of their files."""
    ranks.run(2, _save_on_rank, tmp_path / "c")
    found = _read_timings(tmp_path / "c")
    assert found.ranks == (0, 1)
    assert None not in found.seconds["write"]


def test_many_ranks_keep_the_slowest_and_the_spread() -> None:
    """Of more ranks than the limit the main rank and those that ended last are kept; the spread is that of all."""
    times = [
        _Times(-1.0 - rank / 1000, 0.5, math.nan, math.nan, 0.5, 1.0 + rank, 0.25, 1.5 + rank, 10)
        for rank in range(300)
    ]
    found = make_timings(times, 400.0, background=False)
    assert len(found.ranks) == MOST_RANKS
    assert found.ranks[0] == 0
    assert found.ranks[-1] == 299
    assert found.spread["write"] == (0.5, 150.0, 299.5)
    assert min(filter(None, found.start["plan"]), default=0) >= 0
    assert "stage" not in found.seconds


def test_a_rank_without_files_has_no_time_of_writing() -> None:
    """What a rank did not do is None, not 0."""
    nothing = _Times(-1.0, 0.5, *[math.nan] * 4, math.nan, 0.5, 0)
    found = make_timings([_Times(-1.0, 0.5, math.nan, math.nan, 0.5, 1.0, 0.1, 1.0, 5), nothing], 2.0, background=False)
    assert found.seconds["write"] == (0.5, None)
    assert found.seconds["commit"] == (1.0, 1.5)


def test_columns_of_different_lengths_are_refused() -> None:
    """A record whose timings do not fit together is damaged."""
    with pytest.raises(ValueError, match="different lengths"):
        SaveTimings(ranks=(0, 1), nbytes=(1,), start={}, seconds={}, spread={})

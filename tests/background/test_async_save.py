from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.maintenance.verify import verify_checkpoint
from tests import backends
from tests.background import jobs
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

THREAD_FIRST = pytest.mark.parametrize(
    "persistent", [pytest.param(False, id="thread"), pytest.param(True, id="process", marks=pytest.mark.ci)]
)


@backends.both_in_proof
@pytest.mark.parametrize(
    ("world_size", "persistent"),
    [
        *in_proof((0, True), (4, False)),
        (0, False),
        (1, False),
        (2, False),
        pytest.param(2, True, marks=pytest.mark.ci),
    ],
)
def test_the_state_at_the_moment_of_scheduling_is_saved(
    ranks: Ranks, tmp_path: Path, world_size: int, persistent: bool
) -> None:
    """What changes after scheduling is not saved; the checkpoint is absent before it is finalized, then whole."""
    path = tmp_path / "c"
    if world_size:
        ranks.run(world_size, jobs.one_save, str(path), persistent)
    else:
        jobs.one_save(str(path), persistent)
    assert list(tmp_path.iterdir()) == [path]
    assert not [result for result in verify_checkpoint(path) if result.fault or result.foreign]


@backends.both_in_proof
@THREAD_FIRST
def test_saves_in_flight_do_not_mix(ranks: Ranks, tmp_path: Path, persistent: bool) -> None:
    """Five saves scheduled at once, two of them staged at a time, end in order, each with its own content."""
    ranks.run(2, jobs.several_saves, str(tmp_path), persistent)
    assert len(list(tmp_path.iterdir())) == 5


@backends.both_in_proof
def test_polling_finalizes_on_all_ranks_at_the_same_time(ranks: Ranks, tmp_path: Path) -> None:
    """A training loop that polls without blocking finds the save written at the same poll on all ranks."""
    counts = ranks.run(4, jobs.polled_save, str(tmp_path / "c"), False)
    assert len(set(counts)) == 1


@backends.both_in_proof
@THREAD_FIRST
def test_an_error_in_the_background_names_rank_and_file(ranks: Ranks, tmp_path: Path, persistent: bool) -> None:
    """A file that one rank cannot write is the same error on all, with the rank and the file; nothing is left."""
    messages = ranks.run(2, jobs.fails_on_one_rank, str(tmp_path / "c"), persistent, 1)
    assert len(set(messages)) == 1
    assert "rank 1" in messages[0]
    assert backends.data_file(1) in messages[0]
    assert not list(tmp_path.iterdir())


@backends.both_in_proof
def test_ranks_that_are_out_of_step_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks that finalize different requests all get an error that names the two."""
    messages = ranks.run(3, jobs.out_of_step, str(tmp_path / "c"))
    assert len(set(messages)) == 1
    assert "number 1 and number 2" in messages[0]
    assert not list(tmp_path.iterdir())


@backends.both_in_proof
def test_ranks_that_are_out_of_step_can_close(ranks: Ranks) -> None:
    """close() of queues that can never be finalized gives up, with the same error on all ranks."""
    messages = ranks.run(2, jobs.closed_out_of_step)
    assert len(set(messages)) == 1
    assert "number 1 and number 2" in messages[0]


@backends.both_in_proof
def test_ranks_may_add_different_finalize_functions(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron's first and last rank add functions that the others do not have: all run, and no rank waits."""
    ran = ranks.run(3, jobs.finalized_as_megatron_does, str(tmp_path / "c"))
    assert ran == [["tracker"], [], ["one logger", "other logger"]]


@backends.both_in_proof
def test_ranks_wait_together_and_at_most_as_long_as_told(ranks: Ranks) -> None:
    """Polling and a bounded wait leave a request scheduled on all ranks as long as one rank writes."""
    ranks.run(3, jobs.waits_at_most)


@backends.both_in_proof
def test_one_ranks_error_does_not_wait_for_another_ranks_writing(ranks: Ranks) -> None:
    """An error is everyone's while another rank still writes: it would be in vain."""
    (first, _), (second, had_written) = ranks.run(2, jobs.one_rank_fails_while_another_writes)
    assert first == second
    assert "no space" in first
    assert not had_written


@backends.both_in_proof
def test_requests_in_another_order_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Saves that ranks have scheduled in different orders are the same error on all, and never mixed."""
    messages = ranks.run(2, jobs.in_another_order, str(tmp_path))
    assert len(set(messages)) == 1
    assert "ranks disagree on save_in_this_place_of_the_queue" in messages[0]
    assert not list(tmp_path.iterdir())


@backends.both_in_proof
def test_a_queue_left_by_an_error_on_one_of_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Where one of several ranks fails, its scheduled saves are given up; the others are told within the timeout."""
    ranks.run(2, jobs.left_by_an_error, str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()

"""Who is missing when a collective fails, whenever the ranks have entered it, and in whichever group."""

from __future__ import annotations

from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.distributed.group_failure import POLL_INTERVAL, Call, Deadlines, Diagnosis, GroupFailure
from tests.distributed.group_failure import DIED, STOPPED
from tests.distributed.simulated import BEGIN, Job, Outcome, View

if TYPE_CHECKING:
    from collections.abc import Collection

WITHOUT_STORE = (
    " (the process group's store, which rank 0 hosts, does not answer either: compare the errors of other ranks)"
)


#: Timeouts of groups: of tests, of NCCL and of gloo.
TIMEOUTS = (3.0, 20.0, 600.0, 1800.0)


def _check(found: dict[int, Outcome], ranks: Collection[int], text: str, missing: tuple[int, ...], by: float) -> None:
    """Check that these ranks, and no others, have found the same, at a time of the simulation at the latest."""
    assert set(found) == set(ranks)
    assert {outcome.diagnosis for outcome in found.values()} == {Diagnosis(text, missing)}
    assert max(outcome.at for outcome in found.values()) <= by


@pytest.mark.parametrize("host", [None, 1])
def test_a_rank_that_dies_is_named_long_before_the_timeout(host: int | None) -> None:
    """Whichever rank dies, all others say so as soon as they have answered, however long the group's timeout is."""
    for timeout in TIMEOUTS:
        for victim in {0, 1, 2} - {host}:
            job = Job(timeout=timeout, dies={victim: 1.0}, host=host)
            soon = 1.0 + POLL_INTERVAL + 2 * Deadlines.of(timeout).closed
            _check(job.run(), {0, 1, 2} - {victim}, f"rank {victim}" + DIED.format(3), (victim,), soon)


def test_ranks_that_die_together_are_named_together() -> None:
    """The system may close the connections of one a moment after those of the other."""
    job = Job(range(4), 4, dies={1: 1.0, 3: 1.0}, closes_late={3: 0.2})
    _check(job.run(), {0, 2}, "ranks 1, 3" + DIED.format(4), (1, 3), by=6.0)


def test_a_rank_that_stops_is_named_after_the_timeout() -> None:
    """All others name it within the timeout and 2 s, or a tenth of it where that is more."""
    for victim, timeout in [(0, 20.0), (2, 20.0), *((1, timeout) for timeout in TIMEOUTS)]:
        job = Job(timeout=timeout, stops={victim: 0.0})
        text = f"rank {victim}" + STOPPED.format(timeout, 3)
        _check(job.run(), {0, 1, 2} - {victim}, text, (victim,), by=timeout + max(2.0, timeout / 10))


def test_a_busy_rank_is_not_taken_for_dead() -> None:
    """Who waits hears of a death at once, who comes later hears the same, and no one but the dead rank is named."""
    job = Job(range(4), 4, dies={2: 0.0}, enters={3: 100.0})
    found = job.run()
    _check(found, {0, 1, 3}, "rank 2" + DIED.format(4), (2,), by=105.0)
    assert max(found[0].at, found[1].at) < 5.0


def test_a_rank_that_came_late_and_waits_is_not_taken_for_stopped() -> None:
    """The timeout of the rank that came first ends the wait of all, and only the one that never came is named."""
    for late in (0, 1):
        job = Job(enters={late: 599.8}, stops={2: 0.0})
        _check(job.run(), {0, 1}, "rank 2" + STOPPED.format(600, 3), (2,), by=660.0)


def test_a_loaded_node_is_not_taken_for_stopped_or_dead() -> None:
    """Where ranks need seconds to wake up and to answer, only the rank that is missing is named."""
    slow = {1: 2.5, 3: 2.5}
    died, stopped = "rank 2" + DIED.format(4), "rank 2" + STOPPED.format(600, 4)
    _check(Job(range(4), 4, dies={2: 0.0}, delay=slow).run(), {0, 1, 3}, died, (2,), by=30.0)
    _check(Job(range(4), 4, stops={2: 0.0}, delay=slow).run(), {0, 1, 3}, stopped, (2,), by=660.0)


def test_a_rank_that_times_out_is_not_taken_for_dead() -> None:
    """Its connections are closed before it knows; who came later and sees that waits until it has answered."""
    job = Job(enters={0: 10.0}, delay={2: 1.2}, stops={1: 0.0})
    _check(job.run(), {0, 2}, "rank 1" + STOPPED.format(600, 3), (1,), by=660.0)


def test_no_rank_is_blamed_where_all_are_there() -> None:
    """Where a call fails on one rank, all end at once with its reason, and none is said to be missing."""
    text = (
        "a collective of 3 ranks failed in 'meeting', and none of them is missing: a connection broke, or the call was "
        "wrong (tensors of different sizes)"
    )
    _check(Job(fails=[1]).run(), {0, 1, 2}, text, (), by=5.0)


def test_in_smaller_groups_ranks_have_the_numbers_of_the_job() -> None:
    """A rank is named by its number in the whole job, with the ranks of its group."""
    job = Job([1, 3], 4, dies={3: 0.0})
    _check(job.run(), {1}, "rank 3 (of the group of ranks 1, 3)" + DIED.format(2), (3,), by=5.0)


def test_an_error_of_a_large_group_names_the_first_ranks_and_how_many_more() -> None:
    """The line of a log stays one that is read; ``missing_ranks`` has all."""
    job = Job(range(0, 200, 2), 200, dies=dict.fromkeys(range(2, 200, 2), 0.0))
    (outcome,) = job.run().values()
    assert outcome.diagnosis.missing == (*range(2, 200, 2),)
    assert "40, ... and 79 more (of the group of ranks 0, 2, " in outcome.diagnosis.text
    assert "38, ... and 80 more) died or left" in outcome.diagnosis.text


def test_the_host_of_the_store_dies() -> None:
    """Who finds the store gone names the rank that hosts it, and that ranks may have found out different things."""
    job = Job(dies={0: 1.0}, host=0)
    _check(job.run(), {1, 2}, "rank 0" + DIED.format(3) + WITHOUT_STORE, (0,), by=5.0)


def test_the_host_of_the_store_stops() -> None:
    """The store does not answer for as long as the process that hosts it stands still: that rank is named."""
    for timeout in TIMEOUTS:
        job = Job(timeout=timeout, stops={0: 1.0}, host=0)
        text = "rank 0" + STOPPED.format(timeout, 3) + WITHOUT_STORE
        _check(job.run(), {1, 2}, text, (0,), by=timeout + max(2.0, timeout / 10))


def test_without_the_store_a_rank_names_what_it_sees() -> None:
    """A closed connection, or else all others: a lost store has no more to say."""
    ranks = ((1, 2), {1: 0.0}, "rank 1" + DIED.format(3)), ((1, 2), {}, "ranks 1, 2" + STOPPED.format(600, 3))
    for _, dies, text in ranks:
        job = Job(dies=dies)
        view = View(job, 0)
        view.store = _Lost()  # type: ignore[assignment]
        found = job.run_each({0: lambda _, view=view: _diagnose(view)})[0]  # type: ignore[misc]
        assert (
            found.text
            == f"{text} (the process group's store does not answer either: compare the errors of other ranks)"
        )
        assert found.missing == ((1,) if dies else (1, 2))


def test_without_the_store_only_what_was_closed_first_counts() -> None:
    """A survivor that closes its connections because it has failed is not named; it ends the wait of all others."""
    job = Job(range(4), 4, dies={2: 0.8}, fails=[1], enters={1: 1.5}, delay={0: 0.25})
    job.store = _Lost()  # type: ignore[assignment]
    found = job.run()
    assert [found[rank].diagnosis.missing for rank in (0, 1)] == [(2,), (2,)]
    assert found[3].at < 5.0


class _Lost:
    """A store that fails in every call."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(name)


def _diagnose(view: View, error: str = "Connection closed by peer") -> Diagnosis:
    return GroupFailure(view).diagnose(RuntimeError(error), "meeting")  # type: ignore[arg-type]


def test_the_host_keeps_its_store_until_all_have_read_it() -> None:
    """A survivor that reads late finds the text that the others have; one that never comes delays the host's end."""
    slow = Job(dies={2: 0.0}, host=0, delay={1: 1.5}).run()
    _check(slow, {0, 1}, "rank 2" + DIED.format(3), (2,), by=30.0)
    busy = Job(dies={2: 0.0}, host=0, enters={1: 500.0}).run()
    assert 5.0 < busy[0].at < 5.0 + Deadlines.of(600.0).readers
    assert busy[0].diagnosis == Diagnosis("rank 2" + DIED.format(3), (2,))


def test_the_first_diagnosis_counts_for_all() -> None:
    """Of ranks that find out different things at the same time, all report what the first has published."""
    job = Job()

    def publish(rank: int) -> Diagnosis:
        return GroupFailure(View(job, rank))._publish(Diagnosis(f"by rank {rank}", (rank,)))  # type: ignore[arg-type]

    assert set(job.run_each(dict.fromkeys([1, 2, 0], publish)).values()) == {Diagnosis("by rank 1", (1,))}


def test_ranks_that_wait_in_the_larger_group_hear_of_the_smaller() -> None:
    """Who leaves a group because another group failed tells those who wait for it why; what was published is kept."""
    inner = Diagnosis("rank 3 died", (3,))

    def abandon(job: Job, rank: int) -> Outcome:
        view = View(job, rank)
        view.sleep(20.0)
        return Outcome(GroupFailure(view).abandon(inner), job.clock.now)  # type: ignore[arg-type]

    for host in (None, 0, 2):
        job = Job(range(4), 4, host=host, stops={3: 0.0})
        found = job.run_each({0: job.meet, 1: job.meet, 2: partial(abandon, job), 3: job.meet})
        _check(found, {0, 1, 2}, *inner, by=25.0)
    job = Job(world_size=4, delay={2: 1.0})  # rank 3 is in the smaller group only
    found = job.run_each({0: job.meet, 1: job.meet, 2: partial(abandon, job)})
    _check(found, {0, 1, 2}, *inner, by=25.0)
    job = Job()
    job.run_each({0: lambda rank: GroupFailure(View(job, rank))._publish(Diagnosis("first"))})  # type: ignore[arg-type]
    assert job.run_each({1: partial(abandon, job)})[1].diagnosis.text == "first"


def test_what_became_of_an_earlier_group_is_not_told_of_the_next() -> None:
    """A job that makes its groups anew, with the store that it has, hears of failures from then on alone."""
    first = Job(fails=[0])
    first.run()
    job = Job(enters=dict.fromkeys(range(3), 700.0), dies={2: 710.0}, clock_offsets=dict.fromkeys(range(3), 5.0))
    job.store.values.update(first.store.values)
    job.alive.values.update(first.alive.values)
    _check(job.run(), {0, 1}, "rank 2" + DIED.format(3), (2,), by=720.0)


def test_an_answer_to_an_earlier_failure_is_none() -> None:
    """A rank that was alive when another failure was looked into, and does not answer now, is silent."""
    for age, silent in ((0.0, []), (600.0, []), (611.0, [1])):
        job = Job([0, 1], 2)
        job.alive.values["1"] = str(BEGIN - age).encode()
        assert GroupFailure(View(job, 0))._find_silent_ranks() == silent  # type: ignore[arg-type]


def test_clocks_of_hosts_may_differ() -> None:
    """A rank is alive that says so by a clock that is some seconds behind or ahead."""
    for offset in (-9.0, 9.0):
        job = Job(clock_offsets={1: offset}, stops={2: 0.0}, timeout=20.0)
        _check(job.run(), {0, 1}, "rank 2" + STOPPED.format(20, 3), (2,), by=22.0)


def test_a_rank_that_waits_writes_nothing_and_asks_one_question_at_a_time() -> None:
    """A store that answers late is asked again after its answer, and is heard all the same."""

    def poll(rank: int) -> tuple[list[bool], int, dict[str, bytes]]:
        view = View(job, rank)
        failure = GroupFailure(view)  # type: ignore[arg-type]
        told, before = [failure.is_announced() for _ in range(4)], dict(job.store.values)
        job.store.values["failed"] = str(view.time()).encode()
        return [*told, *(failure.is_announced() for _ in range(2))], view.calls, before

    for delay, calls in ((0.0, 6), (3 * POLL_INTERVAL, 2)):
        job = Job(delay={0: delay})
        told, asked, written = job.run_each({0: poll})[0]
        assert told == [False, False, False, False, delay == 0.0, True]
        assert (asked, written, job.alive.values) == (calls, {}, {})


def test_a_store_that_fails_is_asked_no_more() -> None:
    """A rank that waits goes on without the store once it is gone."""
    job = Job(dies={1: 0.0}, host=1)
    view = View(job, 0)
    failure = GroupFailure(view)  # type: ignore[arg-type]
    assert [failure.is_announced() for _ in range(3)] == [False] * 3
    assert view.calls == 1


def test_a_rank_that_cannot_start_a_thread_goes_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy collective does not fail by it, and the rank asks once a thread can be started."""

    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    view = View(Job(), 0)
    view.call = Call  # type: ignore[method-assign, assignment]
    view.store.set("failed", str(view.time()).encode())
    failure = GroupFailure(view)  # type: ignore[arg-type]
    with monkeypatch.context() as full:
        full.setattr(Thread, "start", refuse)
        assert not failure.is_announced()
        with pytest.raises(RuntimeError, match="can't start new thread"):  # a diagnosis would name ranks not asked
            failure.diagnose(RuntimeError("Connection closed"), "a phase")
    assert failure.is_announced()


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (3.0, Deadlines(survivors=1.0, closed=1.0, readers=0.4, store=0.5, closing=0.1)),
        (20.0, Deadlines(survivors=1.0, closed=1.0, readers=0.4, store=0.5, closing=0.1)),
        (600.0, Deadlines(survivors=30.0, closed=3.0, readers=12.0, store=15.0, closing=0.3)),
        (1800.0, Deadlines(survivors=60.0, closed=6.0, readers=24.0, store=30.0, closing=0.6)),
        (86400.0, Deadlines(survivors=60.0, closed=6.0, readers=24.0, store=30.0, closing=0.6)),
    ],
)
def test_deadlines_follow_from_the_timeout(timeout: float, expected: Deadlines) -> None:
    """A group with a long timeout allows its ranks and its store more; all limits have a least and a largest value."""
    assert Deadlines.of(timeout) == pytest.approx(expected)

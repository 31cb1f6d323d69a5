"""Workers: threads that share items, and the pieces of items, and end with the work."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.errors import CheckpointingException
from shardckpt.storage.workers import Workers, _Job
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_results_by_number_in_any_thread() -> None:
    """Every item is done once, whoever does it, and its result has its number; own items are the caller's."""
    own: set[int] = set()

    def square(number: int) -> int:
        if number >= 100:
            own.add(threading.get_ident())
        return number * number

    found = Workers(4, "w").each(square, enumerate(range(100)), [(n, n) for n in range(100, 120)])
    assert found == {n: n * n for n in range(120)}
    assert own == {threading.get_ident()}
    assert Workers(4, "w").each(square, []) == {}


def test_a_thread_without_items_helps_with_the_pieces_of_anothers() -> None:
    """The pieces of the only item are done by both threads: each waits for the other to have one too."""
    workers = Workers(2, "w")
    met = threading.Barrier(2)

    def whole(item: int) -> list[int]:
        pieces = workers.each(piece, enumerate([item, item + 1]))
        return [pieces[n] for n in sorted(pieces)]

    def piece(number: int) -> int:
        met.wait(60)
        return number

    assert workers.each(whole, [(0, 7)]) == {0: [7, 8]}


def test_the_caller_without_items_helps_too() -> None:
    """When a thread still has an item, and the caller none any more, the caller does pieces of that one."""
    workers = Workers(2, "w")
    caller, taken, met = threading.get_ident(), threading.Event(), threading.Barrier(2)

    def whole(item: int) -> list[int]:
        if threading.get_ident() == caller:
            assert taken.wait(60)
            return [item]
        taken.set()
        return [*workers.each(piece, enumerate([item, item])).values()]

    def piece(number: int) -> int:
        met.wait(60)
        return number

    found = workers.each(whole, enumerate([7, 7]))
    assert sorted(map(len, found.values())) == [1, 2]


def test_pieces_of_many_items_at_once() -> None:
    """Items that are all cut into pieces by threads that share them come out whole: nobody waits for himself."""
    workers = Workers(3, "w")

    def whole(item: int) -> int:
        return sum(workers.each(lambda number: number * item, enumerate(range(50))).values())

    assert workers.each(whole, enumerate(range(40))) == {n: n * 1225 for n in range(40)}


@table("threads", [1, 3])
def test_an_error_is_its_items_and_nothing_is_begun_after_it(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a piece is its item's, and no thread begins a piece or an item once it is recorded."""
    workers = Workers(threads, "w")
    begun: list[int] = []
    recorded = threading.Event()
    do_anyway = _Job.do

    def do(job: _Job[Any, Any], *args: Any) -> None:
        do_anyway(job, *args)
        if job.function is item and job.errors:
            recorded.set()

    def fail(number: int) -> None:
        begun.append(number)
        raise CheckpointingException(f"piece {number}")

    def item(number: int) -> None:
        if number == 0:
            workers.each(fail, enumerate([1000, 1001]))
        begun.append(number)
        assert recorded.wait(60)

    monkeypatch.setattr(_Job, "do", do)
    with pytest.raises(CheckpointingException, match="piece 1000"):
        workers.each(item, enumerate(range(100)))
    assert {1000} <= {*begun} <= {1000, *range(1, threads)}  # each other thread had one item by then
    assert not [thread for thread in threading.enumerate() if thread.name == "w"]


def test_the_first_of_several_errors() -> None:
    """If two items fail at the same time, the one that comes first is raised."""
    met = threading.Barrier(2)

    def item(number: int) -> None:
        met.wait(60)
        raise CheckpointingException(f"item {number}")

    with pytest.raises(CheckpointingException, match="item 3"):
        Workers(2, "w").each(item, [(3, 3), (4, 4)])


def test_an_interrupt_ends_it_once_what_was_begun_has_ended() -> None:
    """Ctrl-C in the caller begins nothing more and waits for the others; their threads end."""
    running = threading.Event()
    ended: list[int] = []
    main = threading.get_ident()

    def item(number: int) -> None:
        if threading.get_ident() == main:
            assert running.wait(60)
            signal.raise_signal(signal.SIGINT)
        running.set()
        threading.Event().wait(0.2)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        Workers(2, "w").each(item, enumerate(range(100)))
    assert len(ended) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "w"]


def test_a_second_interrupt_leaves_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the caller waits for the others ends the wait; they end with what they have begun."""
    workers = Workers(2, "w")

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers._changed, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt):
        workers.each(abs, enumerate(range(2)))
    left = [thread for thread in threading.enumerate() if thread.name == "w"]
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left)


def test_an_interrupt_between_two_items_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes when the caller has taken a piece of another's and not begun it leaves nobody waiting."""
    workers = Workers(2, "w")
    caller, take = threading.get_ident(), _Job.take
    begun, interrupted = threading.Event(), threading.Event()
    outcomes: list[BaseException] = []

    def interrupt(job: _Job[Any, Any], caught: type[BaseException]) -> Any:
        taken = take(job, caught)
        if threading.get_ident() == caller and caught is BaseException and taken is not None:
            interrupted.set()
            raise KeyboardInterrupt
        return taken

    def whole(_: int) -> None:
        if threading.get_ident() == caller:
            assert begun.wait(60)
            return
        try:
            workers.each(piece, enumerate(range(2)))
        except KeyboardInterrupt as exc:
            outcomes.append(exc)
            raise

    def piece(_: int) -> None:
        begun.set()
        assert interrupted.wait(60)

    monkeypatch.setattr(_Job, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        workers.each(whole, enumerate(range(2)))
    assert len(outcomes) == 1


def test_two_callers_at_once() -> None:
    """Threads of the user's that share workers each get their own results."""
    workers = Workers(3, "w")
    found: list[dict[int, int]] = []

    def call(factor: int) -> None:
        found.append(workers.each(lambda number: number * factor, enumerate(range(300))))

    callers = [threading.Thread(target=call, args=(factor,)) for factor in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)
    assert sorted(result[1] for result in found) == [1, 2, 3]
    assert all(result == {n: n * result[1] for n in range(300)} for result in found)


@table("threads", [1, 4])
@table("kind", [MemoryError, KeyboardInterrupt])
def test_an_error_in_making_the_items(threads: int, kind: type[BaseException]) -> None:
    """What the items' generator raises in any thread is raised by the call: no work is left undone in silence."""
    helping = threading.Event()
    main = threading.get_ident()

    def items() -> Iterator[tuple[int, int]]:
        for number in range(1000):
            if number > 3 and (threads == 1 or threading.get_ident() != main):
                helping.set()
                raise kind("no item")
            yield number, number

    def item(number: int) -> None:
        if threads > 1 and threading.get_ident() == main and number > 3:
            assert helping.wait(60)

    with pytest.raises(kind, match="no item"):
        Workers(threads, "w").each(item, items())
    assert not [thread for thread in threading.enumerate() if thread.name == "w"]

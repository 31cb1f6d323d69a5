"""The driver of kills finds a call again whose number is another in the next run."""

from __future__ import annotations

from tests.faults.killer import Killer, Point


class _Recorded(Killer):
    """Its undisturbed run has made the calls that are given."""

    def __init__(self, points: list[Point]) -> None:
        self._points = points

    def points(self) -> list[Point]:
        return self._points


def test_a_call_has_the_number_and_the_thread_of_the_new_run() -> None:
    """A write that the main thread made in one run, and another thread in the next, changes the numbers behind it."""
    data, record = "pwritev2(3<RUN/data>, 8) = 8", "pwritev2(5<RUN/record>, 2) = 2"
    first, second = Point("pwritev2", 1, data), Point("pwritev2", 2, data, earlier=1)
    last = Point("pwritev2", 3, record)
    found = [
        first,
        second._replace(in_main_thread=False, number=1),
        last._replace(number=2, line="pwritev2(4<RUN/record>"),
    ]
    killer = _Recorded(found)
    assert [killer.find_again(point) for point in (first, second, last)] == found
    gone = Point("fsync", 1, "fsync(3<RUN/other>) = 0")
    assert killer.find_again(gone) == gone

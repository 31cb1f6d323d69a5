from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.manager.preemption import Preemption

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The SIGTERMs that come to the handler that was there before."""
    found: list[int] = []

    def hear(number: int, _: Any) -> None:
        found.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    yield found
    signal.signal(signal.SIGTERM, before)


def test_the_first_is_a_wish(heard: list[int]) -> None:
    """The first SIGTERM is taken, the second does what it did before."""
    preemption = Preemption()
    signal.raise_signal(signal.SIGTERM)
    assert (preemption.received, heard) == (True, [])
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_that_are_closed_swallow_nothing(heard: list[int], order: tuple[int, int]) -> None:
    """Managers may be closed in any order: afterwards a SIGTERM does what it did before them."""
    both = [Preemption(), Preemption()]
    for number in order:
        both[number].close()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert not any(each.received for each in both)


def test_several_all_take_the_first(heard: list[int]) -> None:
    """Two managers of a process both save after a SIGTERM; the second one does what it did before them."""
    both = [Preemption(), Preemption()]
    signal.raise_signal(signal.SIGTERM)
    assert [each.received for each in both] == [True, True]
    assert heard == []
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_the_default_is_given_back() -> None:
    """Where there was no handler, a closed one that is called after all leaves the ending to the system."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raised: list[int] = []
    try:
        first, second = Preemption(), Preemption()
        first.close()
        second.close()
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signal, "raise_signal", raised.append)
            handler(signal.SIGTERM, None)
        assert raised == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)

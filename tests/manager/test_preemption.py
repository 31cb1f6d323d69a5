from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from shardckpt.manager import AsyncMode, CheckpointConfig, CheckpointManager
from shardckpt.manager.preemption import GRACE_SECONDS, Preemption
from tests.manager.preemption import heard
from tests.manager.training import Progress

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["heard"]  # fixtures


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock that the handler reads."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("shardckpt.manager.preemption.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def _signal_twice() -> None:
    """As torchrun does, whose ranks a scheduler has signalled already."""
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_signals_count_again_once_the_step_is_committed(heard: list[int], tmp_path: Path, mode: str) -> None:
    """However many come before, the step is saved; after its commit a SIGTERM does what it did before."""
    config = CheckpointConfig(folder=tmp_path, interval=100, async_mode=AsyncMode(mode), save_on_sigterm=True)
    with CheckpointManager(config, {"progress": Progress()}) as manager:
        assert not manager.save(1)
        _signal_twice()
        assert manager.save(2)
        assert manager.preempted
        manager.wait()
        assert heard == []
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert manager.steps() == [2]


def test_the_commit_of_an_earlier_step_is_not_the_one(heard: list[int]) -> None:
    """What was being written when the signal came is not what the signal asks for: the handler stays."""
    preemption = Preemption()
    preemption.before_save(1, {})
    _signal_twice()
    preemption.after_commit(1)
    signal.raise_signal(signal.SIGTERM)
    assert preemption.is_preempted()
    preemption.before_save(2, {})
    signal.raise_signal(signal.SIGTERM)
    assert heard == []
    preemption.after_commit(2)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_after_its_time_a_further_one_counts(heard: list[int], clock: SimpleNamespace) -> None:
    """Who signals a process that has not saved for 30 s wants it to end; the time begins with the first signal."""
    preemption = Preemption()
    _signal_twice()
    clock.now += GRACE_SECONDS - 0.1
    signal.raise_signal(signal.SIGTERM)
    assert (preemption.received, heard) == (True, [])
    clock.now += 0.2
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    preemption.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_that_are_closed_swallow_nothing(heard: list[int], order: tuple[int, int]) -> None:
    """Managers may be closed in any order: afterwards a SIGTERM does what it did before them."""
    both = [Preemption(), Preemption()]
    for number in order:
        both[number].close()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert not any(each.received for each in both)


@pytest.mark.parametrize("first", [0, 1])
def test_several_all_take_the_first(heard: list[int], first: int) -> None:
    """Two managers of a process both save after a SIGTERM; a further one waits for the commits of both."""
    both = [Preemption(), Preemption()]
    _signal_twice()
    assert [each.received for each in both] == [True, True]
    for each in (both[first], both[1 - first]):
        assert each.is_preempted()
        each.before_save(1, {})
        signal.raise_signal(signal.SIGTERM)
        assert heard == []
        each.after_commit(1)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_a_fork_ends_at_its_signal(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork, which saves nothing, a SIGTERM does what it did before: ``Process.terminate()`` ends the fork."""
    preemption = Preemption()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        signal.raise_signal(signal.SIGTERM)
    assert (preemption.received, heard) == (False, [signal.SIGTERM])
    preemption.close()


def test_the_warning_does_not_come_from_inside_of_the_signal(heard: list[int]) -> None:
    """A thread of its own logs it: the training may be inside of the same logging handler, which would never return."""
    threads: queue.Queue[threading.Thread] = queue.Queue()
    handler = logging.Handler()
    handler.emit = lambda _: threads.put(threading.current_thread())  # type: ignore[method-assign]
    logger = logging.getLogger("shardckpt.manager.preemption")
    logger.addHandler(handler)
    preemption = Preemption()
    try:
        signal.raise_signal(signal.SIGTERM)
        assert threads.get() is not threading.main_thread()
        assert heard == []
    finally:
        logger.removeHandler(handler)
        preemption.close()


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

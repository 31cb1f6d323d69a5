"""Signals other than SIGTERM, and requests of the process itself, make the next step be saved."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.manager.preemption import heard
from tests.manager.training import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ranks import Ranks

__all__ = ["heard"]  # fixtures


@pytest.fixture
def heard_user() -> Iterator[list[int]]:
    """The SIGUSR1s that come to the handler that was there before."""
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGUSR1, before)


def _make(folder: Path, **options: Any) -> CheckpointManager:
    config = CheckpointConfig.model_validate({"folder": folder, "interval": 100, **options})
    return CheckpointManager(config, {"progress": Progress()})


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_each_signal_of_a_list_saves_the_step(
    heard: list[int], heard_user: list[int], tmp_path: Path, number: signal.Signals
) -> None:
    """One of several signals is enough; after the commit all of them do what they did before."""
    with _make(tmp_path, save_on_signals=["SIGUSR1", signal.SIGTERM]) as manager:
        assert not manager.save(1)
        signal.raise_signal(number)
        assert manager.save(2)
        assert manager.preempted
        manager.wait()
        assert (heard, heard_user) == ([], [])
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert (heard, heard_user) == ([signal.SIGTERM], [signal.SIGUSR1])


def test_a_signal_that_is_not_listed_is_left_alone(heard: list[int], tmp_path: Path) -> None:
    """With SIGUSR1 alone, a SIGTERM goes to the handler that was there before."""
    with _make(tmp_path, save_on_signals="SIGUSR1") as manager:
        signal.raise_signal(signal.SIGTERM)
        assert not manager.save(1)
    assert heard == [signal.SIGTERM]


def test_managers_with_different_signals_share_those_that_both_have(
    heard: list[int], heard_user: list[int], tmp_path: Path
) -> None:
    """A signal that both list makes both save, one of a single manager that one alone."""
    with (
        _make(tmp_path / "a", save_on_signals=("SIGTERM",)) as first,
        _make(tmp_path / "b", save_on_signals=("SIGUSR1", "SIGTERM")) as second,
    ):
        signal.raise_signal(signal.SIGUSR1)
        assert (first.save(1), second.save(1)) == (False, True)
        signal.raise_signal(signal.SIGTERM)
        assert first.save(2)
    assert (heard, heard_user) == ([], [])


def test_a_request_saves_the_next_step(tmp_path: Path) -> None:
    """request_save does what a signal does, also where no signal is handled: the next step is saved, once."""
    with _make(tmp_path, save_on_signals=()) as manager:
        assert not manager.save(1)
        manager.request_save()
        assert not manager.preempted
        assert manager.save(2)
        assert manager.preempted
        assert not manager.save(3)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]


def _request_on_one(path: Path) -> list[bool]:
    with _make(path, save_on_signals=()) as manager:
        if dist.get_rank() == 1:
            manager.request_save()
        return [manager.save(1), manager.preempted]


def test_the_request_of_one_rank_is_enough(ranks: Ranks, tmp_path: Path) -> None:
    """Every rank saves the step that one of them asks for."""
    assert ranks.run(3, _request_on_one, tmp_path) == [[True, True]] * 3


def test_a_signal_after_a_request_is_the_first_one_still(heard: list[int], tmp_path: Path) -> None:
    """What asks for a save does not let the signal that follows it end the process before the step is saved."""
    with _make(tmp_path, save_on_sigterm=True) as manager:
        manager.request_save()
        signal.raise_signal(signal.SIGTERM)
        assert heard == []
        assert manager.save(1)


def test_a_request_that_nobody_would_hear_is_an_error(tmp_path: Path) -> None:
    """Without the option ranks do not tell each other of requests: the error names the option; so when closed."""
    manager = _make(tmp_path)
    with manager, pytest.raises(CheckpointingException, match=r"request_save.*save_on_signals=\(\)"):
        manager.request_save()
    with pytest.raises(CheckpointingException, match="request_save: the CheckpointManager is closed"):
        manager.request_save()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("SIGUSER1", "'SIGUSER1' is no signal"),
        (0, "0 is no signal"),
        (True, "True is no signal"),
        (signal.SIGKILL, "no process can handle SIGKILL"),
        (
            ["SIGKILL", "SIGFOO"],
            "SIGUSR1 and SIGTERM are; save_on_signals: no process can",
        ),
    ],
)
def test_what_is_no_signal_is_refused(given: Any, said: str) -> None:
    """A name that matches no signal, or one that cannot be handled, is an error of the configuration."""
    with pytest.raises(ValueError, match=re.escape(said)):
        CheckpointConfig.model_validate({"save_on_signals": given})

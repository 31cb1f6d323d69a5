from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from shardckpt.tensors.torch_private import check_torch, one_thread
from tests.resources import refuse_threads
from tests.tables import table
from tests.tensors.torch_private import OLDEST

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()


@table("version", ["2.9.1+cu128", "2.9.0a0+145a3a7bda.nv25.10", "1.13.1", "0.4"])
def test_an_older_torch_is_refused(version: str) -> None:
    """The error names the release that was found, where, the oldest that works, and the command that installs it."""
    with pytest.raises(ImportError, match=re.escape(version)) as caught:
        check_torch(version)

    assert f"needs torch {OLDEST} or newer" in str(caught.value)
    assert f"pip install 'torch>={OLDEST}'" in str(caught.value)
    assert torch.__path__[0] in str(caught.value)


@table("version", ["2.10.0", "2.10.0a0+git0.nv25.12", "2.13.0", "2.15.0+cpu", "3.0.0rc1", "10.1"])
def test_the_oldest_torch_and_newer_ones_are_not(version: str) -> None:
    """Numbers are compared as numbers, and a vendor's early build counts as its release."""
    check_torch(version)


def test_the_floor_is_the_one_that_pip_knows() -> None:
    """What is refused at import is what pip does not install beside this package."""
    assert re.search(r'"torch>=([\d.]+)"', PYPROJECT)[1] == OLDEST


def test_one_thread_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's number of threads is the same after the block, though none could restore it for new ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    refuse_threads(monkeypatch)
    try:
        with one_thread():
            pass
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_one_thread_leaves_other_threads_as_they_are() -> None:
    """A thread that computes alone changes neither the caller's number of threads, nor that of threads that begin."""
    found: dict[str, int] = {}

    def look(name: str) -> None:
        found[name] = torch.get_num_threads()

    def work() -> None:
        with one_thread():
            look("inside")
            beginning = threading.Thread(target=look, args=("new",))
            beginning.start()
            beginning.join()
        look("after")

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        working = threading.Thread(target=work)
        working.start()
        working.join()
        look("caller")
    finally:
        torch.set_num_threads(before)
    assert found == {"inside": 1, "new": 3, "after": 3, "caller": 3}


class _Gate:
    """Stands for the lock: another thread, which changes torch's number of threads, has it until ``opened``."""

    def __init__(self) -> None:
        self.asked, self.opened = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self.asked.set()
        self.opened.wait(60)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_new_thread_does_not_keep_the_number_of_another_that_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread asks for its own number only when no other one has set torch's to 1 for itself."""
    gate, found = _Gate(), []
    monkeypatch.setattr("shardckpt.tensors.torch_private._THREAD_COUNT_LOCK", gate)

    def work() -> None:
        with one_thread():
            pass
        found.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        working = threading.Thread(target=work)
        working.start()
        assert gate.asked.wait(60)
        torch.set_num_threads(3)
        gate.opened.set()
        working.join()
    finally:
        torch.set_num_threads(before)
    assert found == [3]

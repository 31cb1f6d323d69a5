"""Progress of operations, from ``shardckpt_event``: reported to who asks, and shown as lines or a bar."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.engine.display import show_progress
from shardckpt.engine.progress import Progress
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager
from tests.backends import Backend, both_in_proof
from tests.plugged import registered
from tests.plugins.manager import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_COUNT = 1 << 20


class _Watcher(Recorder):
    wants_progress = True

    def totals(self) -> dict[str, tuple[int, int]]:
        """The last bytes and the total, by operation."""
        return {event.operation: (event.nbytes, event.total) for event in self.find("progress")}


@pytest.fixture
def watcher() -> Iterator[_Watcher]:
    """A plugin that asks for progress, as long as a test runs."""
    with registered(_Watcher()) as watcher:
        yield watcher


def _save(path: Path) -> None:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(_COUNT))}, path)


@both_in_proof
def test_long_operations_report_their_bytes(backend: Backend, tmp_path: Path, watcher: _Watcher) -> None:
    """A save, a conversion and an export report bytes that ascend to their total, which is that of their tensors."""
    _save(tmp_path / "c")
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "f.pt"), "--to", "torch"]) == 0
    other = "safetensors" if backend.name == "torch_dist" else "torch_dist"
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "d"), "--to", other]) == 0
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "e")]) == 0
    nbytes = 4 * _COUNT
    found = watcher.totals()
    assert found["save"] == (nbytes, nbytes)
    assert found["convert"] == (2 * nbytes, 2 * nbytes)
    assert found["export"] == (nbytes, nbytes)
    for place in {event.directory for event in watcher.find("progress")}:
        done = [event.nbytes for event in watcher.find("progress") if event.directory == place]
        assert done == sorted(done)


def test_nobody_pays_who_does_not_ask(tmp_path: Path) -> None:
    """A listener without ``wants_progress`` gets no event of progress from a save."""
    with registered(Recorder()) as recorder:
        _save(tmp_path / "c")
    assert not recorder.find("progress")


@pytest.mark.parametrize("mode", ["disabled", "async", pytest.param("async_with_pinned_mem", marks=pytest.mark.ci)])
def test_the_manager_shows_its_saves_if_it_is_told_to(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no terminal is, lines with bytes, rate and time; nothing without the option, or after the save."""
    monkeypatch.setattr("shardckpt.engine.display._PAUSE", 0.0)
    for shows in (False, True):
        config = CheckpointConfig(folder=str(tmp_path / f"{shows}"), interval=1, async_mode=mode, show_progress=shows)
        with CheckpointManager(config, {"model": torch.nn.Linear(512, 512)}) as manager:
            for step in (1, 2):  # each has bytes of its own
                manager.save(step)
                manager.wait()
        _save(tmp_path / f"other-{shows}")
        lines = capsys.readouterr().err.splitlines()
        assert bool(lines) == shows
        assert all(line.startswith("save: ") and "1.1 MB" in line for line in lines)


@pytest.mark.parametrize("colors", [True, False])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, colors: bool) -> None:
    """On a terminal with rich, a bar shows bytes, rate and time left, and goes at the end; NO_COLOR: without colors."""
    pytest.importorskip("rich")
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal: Any = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colors:
        monkeypatch.setenv("NO_COLOR", "1")
    with show_progress("save"):
        _save(tmp_path / "c")
    assert "save" in terminal.getvalue()
    assert "MB" in terminal.getvalue()
    # the control sequences of colors: foreground and background, of 8, 16, 256 or all colors
    sequences = re.findall(r"\x1b\[([\d;]*)m", terminal.getvalue())
    codes = {int(code) for sequence in sequences for code in sequence.split(";") if code}
    assert bool(codes & {*range(30, 50), *range(90, 108)}) == colors


def test_progress_goes_to_who_asks(tmp_path: Path) -> None:
    """A listener without ``wants_progress`` gets none, also beside one that has it."""
    asked, unasked = _Watcher(), Recorder()
    with registered(asked), registered(unasked):
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, tmp_path / "c")
    assert asked.find("progress")
    assert not unasked.find("progress")


def test_progress_never_exceeds_its_total() -> None:
    """Where more is done than was forecast, as of a migration, the last report is that all is done; it comes once."""
    watcher = _Watcher()
    with registered(watcher):
        progress = Progress("migrate", "c", 10, get_plugin_manager())
        for nbytes in (4, 6, 5, 5):
            progress.add(nbytes)
        progress.end()
    assert [(event.nbytes, event.total) for event in watcher.events] == [(0, 10), (10, 10)]

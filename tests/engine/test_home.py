"""``~`` in a location is the home directory, wherever a user names a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.engine.locations import find_local
from shardckpt.huggingface import dcp_to_torch_save, torch_save_to_dcp
from shardckpt.manager import CheckpointConfig, CheckpointManager, mark_checkpoint
from shardckpt.manager.marks import identify_save
from shardckpt.mapping import ShardedTensor


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory, and a working directory in which nothing may be made."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def _state() -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}


def test_save_and_load_find_the_home_directory(home: Path) -> None:
    """A text and a Path with ``~`` name what they name in a shell, for a save, a load, a mark and a file."""
    dc.save(_state(), "~/text")
    dc.save(_state(), Path("~/path"))
    mark_checkpoint("~/text", identify_save("~/text"), "failed", checked="digests", files=1)
    assert torch.equal(dc.load(_state(), Path("~/text"))["w"], dc.load(_state(), home / "path")["w"])
    dcp_to_torch_save("~/text", "~/w.pt")
    torch_save_to_dcp("~/w.pt", "~/back")
    assert {"text", "path", "w.pt", "back", ".shardckpt-marks"} <= {path.name for path in home.iterdir()}
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("folder", ["~/run", Path("~/run")])
def test_a_manager_saves_below_the_home_directory(home: Path, folder: str | Path) -> None:
    """The manager's folder and its initial checkpoint may begin with ``~``."""
    model = torch.nn.Linear(2, 2)
    with CheckpointManager(CheckpointConfig(folder=folder, interval=1), {"model": model}) as manager:
        manager.save(1, last_step=True)
        assert manager.load()
    assert (home / "run" / "step-1").is_dir()
    config = CheckpointConfig(folder="~/other", initial_load_path="~/run/step-1")
    with CheckpointManager(config, {"model": model}) as manager:
        assert manager.load()
    assert not list(Path.cwd().iterdir())


def test_the_command_finds_the_home_directory(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell leaves ``--html=~/page`` as it is, and a quoted path: the command finds both."""
    dc.save(_state(), home / "c")
    for arguments in (["verify", "~/c"], ["ls", "~"], ["inspect", "~/c"], ["inspect", "~/c", "--html=~/page.html"]):
        assert main(arguments) == 0, capsys.readouterr()
    assert (home / "page.html").is_file()


def test_only_the_beginning_of_a_path_is_expanded() -> None:
    """A URL, and a ``~`` elsewhere in a path, stay as they are."""
    assert find_local("s3://~/c") is None
    assert find_local("a/~/c") == Path.cwd().resolve() / "a" / "~" / "c"
    assert find_local("file:///~/c") == Path("/~/c")

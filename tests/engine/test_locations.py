"""Places that no checkpoint may be saved to, and paths that name none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("path", ["", "file://"])
def test_an_empty_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A variable that is not set is not the current directory: neither a save nor a load takes it for one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="the path is empty"):
        dc.save({"step": 1}, path)
    with pytest.raises(StorageError, match="the path is empty"):
        dc.load({}, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [".", ".."])
def test_the_current_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A save that would leave the process in a directory that is gone is refused, and the directory stays."""
    here = tmp_path / "outer" / "inner"
    here.mkdir(parents=True)
    (here / "job.py").write_text("")
    monkeypatch.chdir(here)
    with pytest.raises(StorageError, match=r"this process works in it .*: change to another directory first"):
        dc.save({"step": 1}, path, overwrite=True)
    dc.save({"step": 1}, "step-1")
    assert (here / "job.py").is_file()
    assert dc.load({}, "step-1") == {"step": 1}


def test_a_relative_path_in_a_directory_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that the current directory is gone, and what to give."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError, match="the current directory of this process is gone: give an absolute path"):
        dc.load({}, "step-1")

"""What a rank does of a commit, where its place fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.engine.committers import make_committer
from shardckpt.plugins import get_plugin_manager

if TYPE_CHECKING:
    import pytest


def test_an_abort_raises_nothing_where_the_file_server_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the save is what its caller gets: what cannot be looked at is a warning."""
    committer = make_committer(
        tmp_path / "ckpt", get_plugin_manager(), overwrite=False, journal=None, memory_budget=None
    )
    committer.begin()

    def fail(self: Path, **_: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        committer.abort([], is_main=True)
    assert "cannot access" in caplog.text
    assert "ESTALE" in caplog.text
    assert not list(tmp_path.iterdir())

"""The error of a save without space, with advice that is no reason to fail in another way."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.engine.space import explain_full
from shardckpt.errors import NotEnoughSpaceError

if TYPE_CHECKING:
    import pytest


def test_a_folder_that_cannot_be_listed_does_not_hide_the_lack_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder does not answer any more, as of a server that is gone, the error is that of the save still."""

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "glob", fail)
    error = explain_full(NotEnoughSpaceError("no space is left"), tmp_path / "step-1")
    assert str(error).startswith("no space is left. To make space: ")

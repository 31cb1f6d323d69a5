"""What a killed process has left is taken over only where it can be looked at."""

from __future__ import annotations

import errno
import pathlib
from typing import TYPE_CHECKING, NoReturn

from shardckpt.commit.resume import adopt_staging
from shardckpt.storage.journal import Journal
from tests.commit import owners

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_another_user_has_left_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A staging directory whose permissions hide its journal fails no conversion, and stays."""
    left = owners.leave(tmp_path / "ckpt", owners.dead())

    def refuse(_: Path) -> NoReturn:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "lstat", refuse)
        assert adopt_staging(tmp_path / "ckpt", Journal("identity", list)) is None
    assert left.exists()

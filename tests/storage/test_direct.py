"""Direct writes: which file systems have them."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from shardckpt import settings
from shardckpt.storage import direct

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_refused_open_gets_parallel_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the system tells an alignment and yet refuses O_DIRECT, writes are cached, and several files parallel."""
    real_open, direct_flag = os.open, os.O_DIRECT

    def refuse(*_: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def open_cached(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & direct_flag:
            refuse()
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(direct, "_read_alignment", lambda _: 512)
    monkeypatch.setattr("fcntl.fcntl", refuse)
    monkeypatch.setattr(os, "open", open_cached)
    with (tmp_path / "data").open("wb") as file:
        assert direct.open_direct(tmp_path / "data", file.fileno()) is None
    assert direct.bypasses_cache(tmp_path) is False
    assert direct.count_parallel_files(tmp_path) == settings.io_threads()

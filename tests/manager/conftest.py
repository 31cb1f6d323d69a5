"""What the manager's tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec
import pytest

from tests.remote.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The directory ``store``, whose steps are at ``faulty://<tmp_path>/store``."""
    return Store(tmp_path / "store")


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL in this process's memory."""
    yield "memory://bucket/run"
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]

"""What the tests of URLs share."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import pytest

from tests.remote.servers import moto_server, variables
from tests.remote.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path, no_pauses: None) -> Store:
    """An empty store, which nobody waits for."""
    return Store(tmp_path / "store")


@pytest.fixture(autouse=True)
def no_spool_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every save removes its spool directories, whatever became of it."""
    folder = tmp_path_factory.mktemp("spools")  # of this test alone: other processes have spools, too
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.glob("shardckpt-spool-*"))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A real S3 server."""
    with moto_server() as found:
        yield found


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server, of which this process knows."""
    for name, value in variables(endpoint).items():
        monkeypatch.setenv(name, value)
    return endpoint

"""What the tests of obstore share."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import pytest
from obstore.store import MemoryStore

from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.plugins import get_plugin_manager, hookimpl
from shardckpt.plugins.stores import open_folder
from tests.plugged import registered
from tests.remote.servers import BUCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
numbers = count()


@pytest.fixture
def url(s3: str) -> str:
    """A URL without objects on the server."""
    return f"s3://{BUCKET}/run-{next(numbers)}/step-1"


@pytest.fixture
def folder() -> Iterator[ObstoreFolder]:
    """The folder that serves objects://bucket, in this process's memory."""
    store = MemoryStore()
    with serving(lambda url: ObstoreFolder(url, store, "c")) as url:
        yield open_folder(url, get_plugin_manager())  # type: ignore[misc]


@contextmanager
def serving(make: Callable[[str], ObstoreFolder]) -> Iterator[str]:
    """Serve objects:// by a function of the URL."""

    class Server:
        @hookimpl(tryfirst=True)
        def shardckpt_filesystem(self, url: str) -> ObstoreFolder | None:
            return make(url) if url.startswith("objects://") else None

    with registered(Server()):
        yield "objects://bucket"

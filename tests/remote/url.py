"""What the tests of url share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL in this process's memory."""
    yield "memory://bucket/folder/c"
    fsspec.filesystem("memory").store.clear()

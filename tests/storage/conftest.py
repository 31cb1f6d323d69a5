"""Fixtures of the tests of storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.storage.direct import bypasses_cache

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def direct_directory(disk: Path) -> Path:
    """A directory on a file system with direct writes."""
    if not bypasses_cache(disk):
        pytest.skip(f"the file system of {disk} has no direct writes")
    return disk

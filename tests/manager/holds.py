"""What the tests of holds share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.manager import (
    KeepLatest,
)
from shardckpt.manager.garbage_collection import collect_garbage
from tests.manager import folders

if TYPE_CHECKING:
    from pathlib import Path


NEWEST = [KeepLatest(1)]


def collect_newest(folder: str | Path) -> list[int]:
    """Remove all but the newest step."""
    return collect_garbage(folders.steps_of(folder), NEWEST)

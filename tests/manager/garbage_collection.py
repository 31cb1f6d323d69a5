"""What the tests of garbage collection share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.manager.garbage_collection import collect_garbage
from shardckpt.manager.retention import KeepLatest
from tests.manager import folders

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardckpt.manager.retention import RetentionPolicy


LATEST = [KeepLatest(2)]


def collect(folder: Path | str, policies: Collection[RetentionPolicy] = LATEST, **options: Any) -> list[int]:
    """Remove the steps of a folder that no policy keeps."""
    return collect_garbage(folders.steps_of(folder), policies, **options)

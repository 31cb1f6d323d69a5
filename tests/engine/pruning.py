"""What the tests of pruning share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import dist_checkpointing as dc
from tests.faults import samples

if TYPE_CHECKING:
    from pathlib import Path


OLD, NEW = 1, 2


def save_version(target: Path, version: int = NEW, *, overwrite: bool = True) -> None:
    """Save a version of the sample."""
    dc.save(samples.state_dict(version), target, overwrite=overwrite)


def list_names(folder: Path) -> list[str]:
    """List what lies in a folder."""
    return sorted(path.name for path in folder.iterdir())

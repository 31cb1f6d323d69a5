"""Folders of steps, as training jobs and their users leave them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.manager.steps import StepFolder
from shardckpt.manifest.names import CONTENT_KEY
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins.manager import get_plugin_manager
from tests import backends
from tests.remote import store  # noqa: F401 - it registers faulty:// and looped://, in the ranks too

if TYPE_CHECKING:
    from pathlib import Path

#: Names that no step of ours has, some of which are close to it.
FOREIGN = (
    "backup-step-100.old",
    "step-100.old",
    "step-100-hf",
    "step-0100",
    "step-+7",
    "step--7",
    "step-",
    "step-1e3",
    "step-१२",
    "Step-9",
    "ft-replicat-3",
    "notes",
)
NUMBERS = 1000
#: Where a folder of steps is, for ``format``.
PLACES = pytest.mark.parametrize("place", ["{}", "local://{}"], ids=["directory", "store"])
#: On a store that has folders it stays, empty: to remove it could remove a lease that was just written.
HOLDS = ".shardckpt-holds"


def save(
    folder: str | Path,
    step: int,
    name: str = "step-{}",
    *,
    overwrite: bool = False,
    config: Any = None,
    **metrics: float,
) -> None:
    """A step's checkpoint, as the manager of such a configuration saves it."""
    values = torch.arange(NUMBERS, dtype=torch.float32) + step
    state = {"w": ShardedTensor.from_rank_offsets("w", values), "step": step}
    content = {CONTENT_KEY: {"step": step, "metrics": metrics, "config": config}}
    dc.save(state, f"{folder}/{name.format(step)}", content_metadata=content, overwrite=overwrite)


def save_all(folder: str | Path, *steps: int, name: str = "step-{}") -> None:
    """Checkpoints of several steps."""
    for step in steps:
        save(folder, step, name)


def is_intact(path: str | Path, step: int) -> bool:
    """Whether the checkpoint of a step loads, bit for bit."""
    template = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(NUMBERS))}
    try:
        loaded = dc.load(template, str(path))
    except CheckpointingException:
        return False
    return torch.equal(loaded["w"], torch.arange(NUMBERS, dtype=torch.float32) + step)


def steps_of(folder: str | Path) -> StepFolder:
    """The folder as the manager sees it."""
    return StepFolder(folder, get_plugin_manager())


def damage(path: Path) -> None:
    """Cut the data file of a checkpoint."""
    data = path / backends.data_file(0)
    os.truncate(data, data.stat().st_size - 1)


def lose_marker(path: Path) -> None:
    """Make a directory of a checkpoint one whose save did not end, as other libraries leave it."""
    for name in ("metadata.json", "shardckpt.json", *backends.current().for_others):
        (path / name).unlink()


def say_backend(path: Path, backend: str, version: int) -> None:
    """Make a checkpoint one of a strategy that may not be installed."""
    (path / "shardckpt.json").unlink()
    marker = {"sharded_backend": backend, "sharded_backend_version": version}
    (path / "metadata.json").write_text(json.dumps(marker))


def names_in(folder: Path) -> set[str]:
    """All that is in a folder."""
    return {path.name for path in folder.iterdir()}


def rank() -> int:
    """This rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def error_of(action: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Class and text of what the action raises; nothing for no error."""
    try:
        action(*arguments, **options)
    except Exception as exc:  # noqa: BLE001 - the test decides
        return type(exc).__name__, str(exc)
    return "", ""

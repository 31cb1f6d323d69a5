"""Checkpoints of other libraries, and damage to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.tree import GOLDEN

DAMAGES = ("cut by a byte", "cut to a half", "cut to nothing", "missing", "extended", "zeros")


def copy_golden(version: str, to: Path) -> Path:
    """Return a copy of a checkpoint that Megatron wrote, which has no digests."""
    return Path(shutil.copytree(GOLDEN / f"mcore-{version}", to / "golden"))


def save_plain_dcp(to: Path) -> Path:
    """Return a directory of plain DCP with tensors and values."""
    dcp.save({"a": torch.arange(50), "b": torch.ones(4, 5), "steps": 3}, checkpoint_id=to / "dcp", no_dist=True)
    return to / "dcp"


def damage(path: Path, how: str) -> None:
    """Damage a file, or remove it."""
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        cuts = {"cut by a byte": whole[:-1], "cut to a half": whole[: len(whole) // 2], "cut to nothing": b""}
        path.write_bytes(cuts.get(how, whole + b"\0" if how == "extended" else bytes(len(whole))))

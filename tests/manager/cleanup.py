"""What the tests of cleanup share."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from shardckpt.manager import cleanup_old_checkpoints


def clean(folder: str, limit: Any, shared: bool = True) -> None:
    """On every rank, for one folder."""
    cleanup_old_checkpoints(Namespace(output_dir=folder, save_total_limit=limit), shared)

"""What the tests of train share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.demo import train

if TYPE_CHECKING:
    from pathlib import Path


def read_reports(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What a rank of train.py reports."""
    reports: list[dict[str, Any]] = []
    train.train(train.parse(["--dir", str(folder), *options]), lambda **fields: reports.append(fields))
    return reports

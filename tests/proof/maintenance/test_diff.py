"""Differences between two checkpoints: every kind is found and counted, whatever the formats and the sharding."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import torch

from shardckpt.maintenance import diff_checkpoints
from tests.maintenance.diff import save_values

if TYPE_CHECKING:
    from pathlib import Path


def test_it_finds_one_bit_in_2_gib(tmp_path: Path) -> None:
    """One bit of 2 GiB is found in bounded memory: the process grows by less than 256 MiB."""
    values = {"w": torch.arange(1 << 29, dtype=torch.int32).view(1 << 15, -1)}
    save_values(tmp_path / "one", values)
    values["w"][30_000, 77] ^= 1 << 30
    save_values(tmp_path / "two", values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (found,) = diff_checkpoints(tmp_path / "one", tmp_path / "two").differences
    assert (found.different, found.index) == (1, (30_000, 77))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10

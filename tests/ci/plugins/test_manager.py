from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from tests.plugged import registered
from tests.plugins.manager import Recorder, recorder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

__all__ = ["recorder"]  # fixtures


def _seen_on_a_rank(directory: str) -> list[tuple[int, str, bool]]:
    """Save with one rank's shards wrong; what this rank's plugin sees fail."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world))
    if rank == 1:
        shard.global_offset = (0,)  # overlaps
    with registered(Recorder()) as recorder, pytest.raises(CheckpointingException):
        dc.save({"w": shard}, directory)
    return [(e.rank, e.phase, "'w'" in e.error) for e in recorder.events if e.state == "failure"]


def test_every_rank_reports_its_own_events(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """A rank's plugin sees its own rank's events, and the failure that all ranks agreed on."""
    seen = gloo_ranks.run(2, _seen_on_a_rank, str(tmp_path / "checkpoint"))
    for rank, failures in enumerate(seen):
        assert {failure[0] for failure in failures} == {rank}
        assert failures[-1][1:] == ("", True)


LIGHT = """
import sys
import shardckpt
assert not {"torch", "numpy", "pydantic", "pluggy"} & set(sys.modules), "import shardckpt"
shardckpt.hookimpl, shardckpt.CheckpointingException, dir(shardckpt)
from shardckpt.cli import main
for arguments in (["--help"], ["--version"], ["strategies"], ["strategies", "--help"]):
    try:
        main(arguments)
    except SystemExit as stop:
        assert not stop.code, arguments
    assert not {"torch", "numpy"} & set(sys.modules), arguments
"""


def test_help_and_listing_do_not_import_torch() -> None:
    """`import shardckpt`, the help and the listing of strategies stay light: no torch, no numpy."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch_dist" in done.stdout

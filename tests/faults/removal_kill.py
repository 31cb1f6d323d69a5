"""What the tests of removal kill share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing
from shardckpt.dist_checkpointing import ShardedObject, ShardedTensor
from shardckpt.engine.integrity import save_integrity_manifest
from tests import backends
from tests.faults.kill import bad
from tests.faults.programs import ask

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


SAMPLED = 40


#: Whose checkpoint, and its format.
CASES = pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("ours", "torch_dist"),
        pytest.param("foreign", "torch_dist", marks=pytest.mark.proof),
        pytest.param("ours", "safetensors", marks=pytest.mark.proof),
    ],
    indirect=["backend"],
    scope="module",
)


def save_ours(path: str) -> None:
    """Rank 0 has what is kept and some of what goes, rank 1 nothing but what goes, rank 2 nothing of that."""
    rank = dist.get_rank()
    state: dict[str, Any] = {
        "kept": ShardedTensor.from_rank_offsets("kept", torch.arange(5), replica_id=rank),
        "apart": ShardedTensor.from_rank_offsets("apart", torch.arange(7), replica_id=(rank + 1) % 3),
        "iteration": 3,
    }
    if rank < 2:
        goes = torch.arange(6.0).chunk(2)[rank]
        state["gone.m"] = ShardedTensor.from_rank_offsets("gone.m", goes, (0, rank, 2))
        state["gone.state"] = ShardedObject("gone.state", rank, (2,), (rank,))
    dist_checkpointing.save(state, path)


def save_foreign(path: str) -> None:
    """The same by plain DCP, with what it knows."""
    rank = dist.get_rank()
    state = {
        0: {"kept": torch.arange(5), "gone.a": torch.ones(2), "steps": 3},
        1: {"gone.b": torch.ones(3)},
        2: {"apart": torch.arange(7)},
    }[rank]
    dcp.save(state, checkpoint_id=path)


def report_kills(ranks: Ranks, folder: Path, case: str, count: int, stands: str = "existing") -> dict[str, Any]:
    """What the driver of kills found."""
    path = folder / "pristine" / "ckpt"
    path.parent.mkdir()
    ranks.run(3, save_ours if case == "ours" else save_foreign, str(path))
    save_integrity_manifest(path)
    assert (path / backends.data_file(1)).exists()
    return ask("killer", "remove", folder, stands, count)  # type: ignore[no-any-return]


def check(report: dict[str, Any], allowed: set[str]) -> None:
    """Every removal was killed in its place, left an allowed state, and can be done again; then nothing is left.

    (What is rewritten is read and hashed by other threads, whose calls come at other numbers in each run: a removal
    that was to be killed there may die elsewhere or not at all.)
    """
    for found in report["outcomes"]:
        found["killed"] |= not found["in_main_thread"]
    assert bad(report["outcomes"], allowed) == []
    assert {found["state"] for found in report["outcomes"]} == allowed

"""A process that dies while it removes keys leaves the checkpoint with them or without, at any file system call."""

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
from tests.faults.programs import ask, needs_strace
from tests.faults.test_kill import bad

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

SAMPLED = 40
ALL = 10_000
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

pytestmark = needs_strace


def _save_ours(path: str) -> None:
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


def _save_foreign(path: str) -> None:
    """The same by plain DCP, with what it knows."""
    rank = dist.get_rank()
    state = {
        0: {"kept": torch.arange(5), "gone.a": torch.ones(2), "steps": 3},
        1: {"gone.b": torch.ones(3)},
        2: {"apart": torch.arange(7)},
    }[rank]
    dcp.save(state, checkpoint_id=path)


def _report(ranks: Ranks, folder: Path, case: str, count: int, stands: str = "existing") -> dict[str, Any]:
    """What the driver of kills found."""
    path = folder / "pristine" / "ckpt"
    path.parent.mkdir()
    ranks.run(3, _save_ours if case == "ours" else _save_foreign, str(path))
    save_integrity_manifest(path)
    assert (path / backends.data_file(1)).exists()
    return ask("killer", "remove", folder, stands, count)  # type: ignore[no-any-return]


def _check(report: dict[str, Any], allowed: set[str]) -> None:
    """Every removal was killed in its place, left an allowed state, and can be done again; then nothing is left.

    (What is rewritten is read and hashed by other threads, whose calls come at other numbers in each run: a removal
    that was to be killed there may die elsewhere or not at all.)
    """
    for found in report["outcomes"]:
        found["killed"] |= not found["in_main_thread"]
    assert bad(report["outcomes"], allowed) == []
    assert {found["state"] for found in report["outcomes"]} == allowed


@pytest.mark.ci
@CASES
def test_killed_removal_leaves_old_or_new(ranks: Ranks, disk: Path, case: str) -> None:
    """After a kill at any of the calls that change the disk, all keys or all but the removed are there, digests too."""
    report = _report(ranks, disk, case, SAMPLED)
    assert len(report["outcomes"]) >= SAMPLED
    _check(report, {"old", "new"})
    links = [point["line"] for point in report["points"] if point["call"].startswith("link")]
    linked = {line.split('"')[1].rpartition("/")[2] for line in links}
    assert backends.data_file(2) in linked
    # written anew without removed keys; holds nothing else
    assert not linked & {backends.data_file(0), backends.data_file(1)}


@pytest.mark.proof
def test_killed_removal_where_names_cannot_be_exchanged(ranks: Ranks, disk: Path) -> None:
    """Without RENAME_EXCHANGE a kill at any of the same calls may leave one state more, which is named: set aside."""
    report = _report(ranks, disk, "ours", SAMPLED, "existing, no exchange")
    assert len(report["outcomes"]) >= SAMPLED
    _check(report, {"old", "new", "set aside"})


@pytest.mark.proof
@CASES
@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_every_call(ranks: Ranks, disk: Path, case: str, exchange: bool) -> None:
    """The same at every single call; without RENAME_EXCHANGE the one window is named, and renaming ends it."""
    report = _report(ranks, disk, case, ALL, "existing" if exchange else "existing, no exchange")
    assert len(report["outcomes"]) == len(report["points"])
    _check(report, {"old", "new"} if exchange else {"old", "new", "set aside"})

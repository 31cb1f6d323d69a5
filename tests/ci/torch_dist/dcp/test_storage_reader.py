from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.interop.sample import check_equal
from tests.torch_dist.dcp.storage_reader import load_by_reader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


def _save_alone(path: str) -> None:
    state = {"w": torch.full((3,), float(dist.get_rank())), "rank": dist.get_rank()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), use_collectives=False)
    found = load_by_reader({"w": torch.zeros(3), "rank": -1}, path)
    check_equal(found, state, "alone")


def test_it_reads_what_ranks_saved_for_themselves(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Stock saves without collectives leave a ``.metadata`` of every rank, which that rank reads."""
    gloo_ranks.run(2, _save_alone, str(tmp_path / "c"))

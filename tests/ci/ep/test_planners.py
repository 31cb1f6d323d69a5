"""The DCP planners: any stored chunks, ranks outside the mesh, refusals, and DCP's own modules left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp

from shardckpt_ep import EPLoadPlanner
from tests.ep.checkpoints import store
from tests.ep.cycles import layouts, load
from tests.ep.live import FQN, Meshes, check, expected, state
from tests.ep.planners import EP_FSDP

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

#: One expert that can be cut into seven pieces, none of them as long as a rank's part.
ROWS = (10, 3)


def _load_all(folder: Path) -> int:
    meshes, count = Meshes(), 0
    for path in sorted(folder.iterdir()):
        for case in (replace(case, inner=ROWS) for case in EP_FSDP):
            held = state(case, meshes.of(case), empty=True)
            dcp.load(held, checkpoint_id=path, planner=EPLoadPlanner(layouts(case, meshes.of(case), held)))
            check(case, meshes.of(case), held)
            load(case, meshes, path)
            count += 1
    return count


def test_tensors_stored_in_any_chunks_load_right(ranks: Ranks, tmp_path: Path) -> None:
    """One, two, three and seven stored chunks along either axis fill every layout, by the planner and the strategy."""
    for dim in (0, 1):
        for pieces in (1, 2, 3, 7):
            path = tmp_path / f"{dim}-{pieces}"
            store(path, expected(8, ROWS), pieces, dim)
            stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            assert len(stored[f"model.{FQN}"].chunks) == len(stored[f"optimizer.state.{FQN}.exp_avg"].chunks) == pieces

    assert ranks.run(4, _load_all, tmp_path) == [32] * 4

"""Every layout of experts, saved and loaded as every other: the tensor of all experts is the single process's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed.checkpoint as dcp

from shardckpt_ep import EPLoadPlanner, EPSavePlanner
from tests.ep.cycles import check_whole, layouts
from tests.ep.live import Meshes, check, state
from tests.ep.matrix import cases_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _with_planners(folder: Path, step: int) -> int:
    """The same through plain DCP: saved by one planner, loaded by the other."""
    meshes, count = Meshes(), 0
    for experts in (8, 5):
        cases = cases_of(experts)
        for number, case in enumerate(cases[::step]):
            path = folder / f"{experts}-{number}"
            held = state(case, meshes.of(case))
            dcp.save(held, checkpoint_id=path, planner=EPSavePlanner(layouts(case, meshes.of(case), held)))
            check_whole(experts, path)
            other = cases[(number * 11 + 1) % len(cases)]
            held = state(other, meshes.of(other), empty=True)
            dcp.load(held, checkpoint_id=path, planner=EPLoadPlanner(layouts(other, meshes.of(other), held)))
            check(other, meshes.of(other), held)
            count += 1
    return count


@pytest.mark.parametrize(
    ("step", "count"), [pytest.param(6, 21, marks=pytest.mark.ci), pytest.param(1, 120, marks=pytest.mark.proof)]
)
def test_planners_take_any_layout_through_plain_dcp(ranks: Ranks, tmp_path: Path, step: int, count: int) -> None:
    """dcp.save and dcp.load with our planners: all experts in true order, and any layout loaded in place."""
    assert ranks.run(4, _with_planners, tmp_path, step) == [count] * 4

"""Every layout of experts, saved and loaded as every other: the tensor of all experts is the single process's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed.checkpoint as dcp

from shardckpt_ep import EPLoadPlanner, EPSavePlanner
from tests.ep.cycles import check_whole, layouts, load, save
from tests.ep.live import Case, Meshes, all_cases, check, state

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _cases(experts: int) -> list[Case]:
    return [case for case in all_cases() if case.experts == experts]


def _cycle(folder: Path) -> int:
    """Save as every case, look at it from one process, and load as another case of as many experts."""
    meshes, count = Meshes(), 0
    for experts in (8, 5):
        cases = _cases(experts)
        for number, case in enumerate(cases):
            path = folder / f"{experts}-{number}"
            save(case, meshes, path)
            check_whole(experts, path)
            load(cases[(number * 7 + 1) % len(cases)], meshes, path)
            count += 1
    return count


@pytest.mark.proof
def test_every_layout_holds_all_experts_in_true_order(ranks: Ranks, tmp_path: Path) -> None:
    """All layouts are saved, hold all experts in true order, and are loaded in place as another."""
    assert ranks.run(4, _cycle, tmp_path, timeout=250) == [120] * 4


def _pairs(folder: Path, experts: int) -> int:
    meshes, count = Meshes(), 0
    cases = [case for case in _cases(experts) if case.kind == "efsdp"]
    for number, case in enumerate(cases):
        save(case, meshes, folder / str(number))
        for other in cases:
            load(other, meshes, folder / str(number))
            count += 1
    return count


@pytest.mark.proof
@pytest.mark.parametrize(("experts", "pairs"), [(8, 15 * 15), (5, 30 * 30)])
def test_every_layout_loads_as_every_other(ranks: Ranks, tmp_path: Path, experts: int, pairs: int) -> None:
    """All pairs of layouts of as many experts, cut by FSDP within the ranks of a mesh in either order."""
    assert ranks.run(4, _pairs, tmp_path, experts, timeout=280) == [pairs] * 4


def _with_planners(folder: Path, step: int) -> int:
    """The same through plain DCP: saved by one planner, loaded by the other."""
    meshes, count = Meshes(), 0
    for experts in (8, 5):
        cases = _cases(experts)
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
    ("step", "count"), [pytest.param(3, 40, marks=pytest.mark.ci), pytest.param(1, 120, marks=pytest.mark.proof)]
)
def test_planners_take_any_layout_through_plain_dcp(ranks: Ranks, tmp_path: Path, step: int, count: int) -> None:
    """dcp.save and dcp.load with our planners: all experts in true order, and any layout loaded in place."""
    assert ranks.run(4, _with_planners, tmp_path, step) == [count] * 4

"""Every layout of experts, saved and loaded as every other: the tensor of all experts is the single process's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ep.cycles import check_whole, load, save
from tests.ep.live import Meshes
from tests.ep.matrix import cases_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _cycle(folder: Path) -> int:
    """Save as every case, look at it from one process, and load as another case of as many experts."""
    meshes, count = Meshes(), 0
    for experts in (8, 5):
        cases = cases_of(experts)
        for number, case in enumerate(cases):
            path = folder / f"{experts}-{number}"
            save(case, meshes, path)
            check_whole(experts, path)
            load(cases[(number * 7 + 1) % len(cases)], meshes, path)
            count += 1
    return count


def test_every_layout_holds_all_experts_in_true_order(ranks: Ranks, tmp_path: Path) -> None:
    """All layouts are saved, hold all experts in true order, and are loaded in place as another."""
    assert ranks.run(4, _cycle, tmp_path, timeout=250) == [120] * 4


def _pairs(folder: Path, experts: int) -> int:
    meshes, count = Meshes(), 0
    cases = [case for case in cases_of(experts) if case.kind == "efsdp"]
    for number, case in enumerate(cases):
        save(case, meshes, folder / str(number))
        for other in cases:
            load(other, meshes, folder / str(number))
            count += 1
    return count


@pytest.mark.parametrize(("experts", "pairs"), [(8, 15 * 15), (5, 30 * 30)])
def test_every_layout_loads_as_every_other(ranks: Ranks, tmp_path: Path, experts: int, pairs: int) -> None:
    """All pairs of layouts of as many experts, cut by FSDP within the ranks of a mesh in either order."""
    assert ranks.run(4, _pairs, tmp_path, experts, timeout=280) == [pairs] * 4

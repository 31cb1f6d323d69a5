"""Experts saved at eight ranks, and loaded at eight, four and one in other layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from tests.ep.cycles import check_whole, load, save
from tests.ep.live import Case, Meshes, all_cases, kinds_of, order

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

#: Meshes of eight ranks, and how many of five experts every expert-parallel rank has where counts are given.
MESHES = [
    (order(("replicate", 2), ("ep", 2), ("efsdp", 2)), (1, 4)),
    (order(("efsdp", 2), ("ep", 2), ("replicate", 2)), (1, 4)),
    (order(("ep", 4), ("efsdp", 2)), (0, 3, 1, 1)),
    (order(("efsdp", 2), ("ep", 4)), (0, 3, 1, 1)),
    (order(("ep", 2), ("efsdp", 4)), (2, 3)),
    (order(("efsdp", 4), ("ep", 2)), (2, 3)),
]
ALONE = order(("ep", 1), ("efsdp", 1))


def _eight() -> list[Case]:
    """Of every mesh and axis one even layout and two uneven ones, held in another way than by the mesh before."""
    found: list[Case] = []
    axes = [(sizes, dim, given) for sizes, given in MESHES for dim in (0, 1)]
    for number, (sizes, dim, given) in enumerate(axes):
        cases = list(kinds_of(sizes, dim, given))
        even = [case for case in cases if case.experts == 8]
        uneven = [case for case in cases if case.experts == 5]
        found += [even[number % 3], uneven[number % 5], uneven[(number + 2) % 5]]
    return found


def _cases() -> list[Case]:
    """The layouts of as many ranks as the job has."""
    made = {8: _eight, 4: lambda: list(all_cases()), 1: lambda: list(kinds_of(ALONE, 0, (5,)))}
    return made[dist.get_world_size()]()


def _save_all(folder: Path) -> int:
    meshes = Meshes()
    for number, case in enumerate(_eight()):
        save(case, meshes, folder / str(number))
        check_whole(case.experts, folder / str(number))
    return _load_all(folder, meshes)


def _load_all(folder: Path, meshes: Meshes | None = None) -> int:
    """Load every checkpoint as one layout of this job's ranks, another one for each."""
    meshes, cases = meshes or Meshes(), _cases()
    for number, saved in enumerate(_eight()):
        others = [case for case in cases if case.experts == saved.experts]
        load(others[(number * 7 + 5) % len(others)], meshes, folder / str(number))
    return len(_eight())


def test_experts_of_eight_ranks_load_at_eight_four_and_one(many_ranks: RankPool, tmp_path: Path) -> None:
    """Every mesh of eight ranks, either order and axis, even and uneven: everywhere the single process's tensor."""
    assert many_ranks.run(8, _save_all, tmp_path, timeout=150) == [36] * 8
    assert many_ranks.run(4, _load_all, tmp_path) == [36] * 4
    assert many_ranks.run(1, _load_all, tmp_path) == [36]

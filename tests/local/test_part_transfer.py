from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed import Comm
from shardckpt.local.part_transfer import Route, transfer_parts
from shardckpt.local.parts import PartFolder, PartId
from tests.backends import data_file
from tests.local.disks import find_directory, flip_bit, get_root, list_names, save_steps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _carried(base: str) -> tuple[dict[Route, str], list[tuple[int, int]]]:
    """Copies of both parts to the other rank, and of a part that is not there."""
    folder = PartFolder(get_root(base))
    (mine,) = folder.list_parts().parts
    save = mine.save
    routes = [Route(PartId(save, 0), 0, 1), Route(PartId(save, 1), 1, 0), Route(PartId(save, 9), 0, 1)]
    faults = transfer_parts(routes, folder, Comm())
    assert not folder.list_parts().leftovers
    return faults, list_names(base)


def test_one_copy_that_fails_leaves_the_others_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Of three copies the one from a damaged file and that of nothing fail, for the same reasons on all ranks."""
    ranks.run(2, save_steps, str(tmp_path), None, [1])
    flip_bit(find_directory(tmp_path / "node0", 1, 0) / data_file(0))
    (faults, first), (same, second) = ranks.run(2, _carried, str(tmp_path))
    assert faults == same
    reasons = {route.part.rank: why for route, why in faults.items()}
    assert sorted(reasons) == [0, 9]
    assert "from rank 0, are not those that were written (digest differs)" in reasons[0]
    assert "ENOENT" in reasons[9]
    assert first == [(1, 0), (1, 1)]
    assert second == [(1, 1)]

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.manager import folders
from tests.manager.cleanup import clean

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


def _clean_nodes(folder: str, ranks_a_node: int) -> None:
    """On nodes of so many ranks each, whose disks are theirs."""
    node, local_rank = divmod(folders.rank(), ranks_a_node)
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        # who is not to remove is given a folder that must stay as it is
        clean(f"{folder}/node{node}" if local_rank == 0 else f"{folder}/others", 1, shared=False)
    finally:
        del os.environ["LOCAL_RANK"]


def test_each_nodes_first_rank_removes_there(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """On disks of the nodes' own, the rank with LOCAL_RANK 0 removes, and no other."""
    for name in ("node0", "node1", "others"):
        folders.save_all(tmp_path / name, 1, 2)
    gloo_ranks.run(4, _clean_nodes, str(tmp_path), 2)
    assert folders.names_in(tmp_path / "node0") == folders.names_in(tmp_path / "node1") == {"step-2"}
    assert folders.names_in(tmp_path / "others") == {"step-1", "step-2"}

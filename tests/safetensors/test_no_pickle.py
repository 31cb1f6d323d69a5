"""A load of (safetensors, 1) unpickles nothing that is stored: by what its code imports, and by what it calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.safetensors import unpickling
from tests.safetensors.no_pickle import save_by_name

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_unpickle_only_their_messages(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """In a load on ranks whatever is unpickled is what a rank has pickled in this load: no byte of a file."""
    path = save_by_name(tmp_path)
    results = ranks.run(world, unpickling.load_on_rank, str(path))
    sent = set().union(*(sent for sent, _ in results))
    received = set().union(*(received for _, received in results))
    assert bool(received) == (world > 1)
    assert received <= sent

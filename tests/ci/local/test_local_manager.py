from __future__ import annotations

import resource
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.local import TensorAwareStateDict
from shardckpt.mapping import ShardedTensor
from tests import backends
from tests.local.disks import (
    check_part,
    find_directory,
    get_rank,
    list_names,
    load_step,
    make_manager,
    make_part,
    read_contents,
    save_steps,
)
from tests.local.local_manager import MIB, latest_of
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


@backends.both_in_proof
@pytest.mark.parametrize(("world", "cliques", "lost"), [(2, (1, 2), [1]), (4, (2, 2), [0, 1]), (4, (1, 4), [0, 1, 3])])
def test_lost_nodes_get_their_parts_back(
    gloo_ranks: RankPool, tmp_path: Path, world: int, cliques: tuple[int, int], lost: list[int]
) -> None:
    """With empty disks in the place of lost ones all ranks load, and those disks have their parts again."""
    gloo_ranks.run(world, save_steps, str(tmp_path), cliques, [1, 2])
    before = {rank: read_contents(find_directory(tmp_path / f"node{rank}", 2, rank)) for rank in lost}
    for rank in lost:
        shutil.rmtree(tmp_path / f"node{rank}")
    logged = gloo_ranks.run(world, load_step, str(tmp_path), cliques, 2)
    for rank in range(world):
        assert (len(logged[rank]) == 1 and "has its part from rank" in logged[rank][0]) is (rank in lost)
    assert {rank: read_contents(find_directory(tmp_path / f"node{rank}", 2, rank)) for rank in lost} == before
    assert gloo_ranks.run(world, load_step, str(tmp_path), cliques, 2) == [[]] * world


def test_a_lost_clique_is_named(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Where a part is on no disk any more its step is not found, and to load it is an error that names the ranks."""
    gloo_ranks.run(4, save_steps, str(tmp_path), (2, 2), [5])
    for rank in (0, 2):
        shutil.rmtree(tmp_path / f"node{rank}")
    (latest, logged), *others = gloo_ranks.run(4, latest_of, str(tmp_path), (2, 2))
    assert latest is None
    assert logged == [
        "local checkpoints: step 5 is incomplete: no disk has an undamaged part of ranks 0, 2; it is ignored"
    ]
    assert others == [(None, [])] * 3
    for step in (None, 5):
        for outcome in gloo_ranks.outcomes(4, load_step, str(tmp_path), (2, 2), 5, step):
            assert outcome.kind == "IncompleteCheckpointError"
            assert "ranks 0, 2" in outcome.message
            assert "dist_checkpointing.load()" in outcome.message


def test_ranks_agree_on_the_newest_step(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Where disks have different steps, all ranks take the newest that all parts are there of."""
    gloo_ranks.run(2, save_steps, str(tmp_path), None, [1, 2, 3], 3)
    shutil.rmtree(find_directory(tmp_path / "node1", 3, 1))
    assert [latest for latest, _ in gloo_ranks.run(2, latest_of, str(tmp_path))] == [2, 2]
    assert ["step 3" in str(logged) for logged in gloo_ranks.run(2, load_step, str(tmp_path), None, 2)] == [True, False]
    shutil.rmtree(find_directory(tmp_path / "node0", 2, 0))
    assert [latest for latest, _ in gloo_ranks.run(2, latest_of, str(tmp_path))] == [1, 1]


def _limited_save(base: str, cliques: tuple[int, int]) -> tuple[str, int | None, list[Any]]:
    """Save a step where rank 1 can write its own part, and not the larger one of rank 0."""
    manager = make_manager(base, cliques)
    manager.save(make_part(1), 1)
    shard = ShardedTensor.from_rank_offsets(f"w{get_rank()}", torch.ones(3 * MIB if get_rank() == 0 else 10))
    part, _ = TensorAwareStateDict.from_state_dict({"w": shard}, "atomic")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(CheckpointingException) as caught:
            manager.save(part, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found = manager.find_latest(), list_names(base)
    check_part(manager.load(), 1)
    manager.save(part, 3)
    assert manager.find_latest() == 3
    return str(caught.value), *found


@pytest.mark.parametrize(("world", "cliques"), [(2, (1, 2)), *in_proof((4, (1, 2)))])
def test_a_copy_that_cannot_be_written_fails_the_save(
    gloo_ranks: RankPool, tmp_path: Path, world: int, cliques: tuple[int, int]
) -> None:
    """A full disk on one rank: the same error on all, nothing of the step stays, the one before it loads."""
    outcomes = gloo_ranks.run(world, _limited_save, str(tmp_path), cliques)
    assert len({message for message, _, _ in outcomes}) == 1
    assert "rank 1: cannot write" in outcomes[0][0]
    assert [latest for _, latest, _ in outcomes] == [1] * world
    assert [names for _, _, names in outcomes] == [[(1, r - r % 2), (1, r - r % 2 + 1)] for r in range(world)]

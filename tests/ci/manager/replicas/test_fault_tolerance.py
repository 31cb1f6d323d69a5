from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.manager.replicas import jobs as replicas
from tests.manager.replicas.jobs import OldManager
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool, Ranks


@pytest.mark.parametrize("mode", ["async", *in_proof("disabled", "async_with_pinned_mem")])
def test_the_first_replica_saves_for_all(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """Who is first at a step saves it, whole and once; each saves its own, unless it takes no part; nothing hangs."""
    results = ranks.run(4, replicas.changing_quorum, str(tmp_path), mode)
    saved, seen, asked, (steps, first, second) = results[0]
    assert saved == [[1, 2, 3], [], []]
    assert results[2][0] == [[], [4, 5, 6], [7, 8, 9]]
    assert results[1] == (*results[0][:2], [0], results[0][3])
    assert asked == [9]
    assert results[3][2] == [0]
    assert seen == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert steps == list(range(1, 10))
    assert first == list(range(1, 7))
    assert second == list(range(1, 10))


@pytest.mark.parametrize("mode", ["async", *in_proof("async_with_pinned_mem", "disabled")])
def test_one_replica_is_lost_and_joins_again(gloo_ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """It takes over what replicas have alike, and reads on where it was when it was lost: nothing twice or never."""
    results = gloo_ranks.run(4, replicas.rejoined, str(tmp_path), mode)
    for giver, taker in ((results[0], results[2]), (results[1], results[3])):
        assert giver["joined"] == (7, 7, [])
        assert taker["loaded"] == (4, 4)
        assert taker["joined"] == (7, 6, [7])
        assert taker["weights"] == giver["weights"]
        assert taker["generator"]
        assert not taker["saved"]
        assert taker["layout"] == giver["layout"] == ([4, 8], [4, 7, 8], [4, 6, 8])


def test_an_older_torchft(ranks: Ranks, tmp_path: Path) -> None:
    """Functions are registered in the way that torchft had before 0.2, too."""
    results = ranks.run(4, replicas.rejoined, str(tmp_path), "disabled", OldManager)
    assert results[2]["weights"] == results[0]["weights"]


def test_a_dataloader_that_is_not_to_be_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """exclude_from_loading may name it: it stays as it is, without a warning or an error."""
    ranks.run(4, replicas.unbroken, str(tmp_path), 4, {})
    config = {"exclude_from_loading": ("dataloader",)}
    assert ranks.run(4, replicas.loaded, str(tmp_path), config) == [(4, 0, None, [])] * 4
    config = {"exclude_from_loading": ("dataloader", "rng")}
    assert ranks.run(4, replicas.loaded, str(tmp_path), config) == [(4, 0, None, [])] * 4


@backends.both_in_proof
@pytest.mark.parametrize("damage", ["none left", "one gone", "bytes"])
def test_its_own_is_missing(gloo_ranks: RankPool, tmp_path: Path, damage: str) -> None:
    """A warning names the folder: the step before is taken, or everything stays; the other replica has its own."""
    gloo_ranks.run(4, replicas.unbroken, str(tmp_path), 4, {})
    own = tmp_path / "ft-replicat-1"
    if damage == "none left":
        shutil.rmtree(own)
    elif damage == "one gone":
        shutil.rmtree(own / "step-4")
    else:
        for path in (own / "step-4").glob(backends.current().data_files):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 255
            path.write_bytes(content)
    results = gloo_ranks.run(4, replicas.loaded, str(tmp_path), {})
    assert results[:2] == [(4, 4, 0, []), (4, 4, 1, [])]
    expected = [(4, 0, None)] * 2 if damage == "none left" else [(4, 3, 2), (4, 3, 3)]
    assert [result[:3] for result in results[2:]] == expected
    assert str(own) in results[2][3][-1]
    assert "dataloader, rng" in results[2][3][-1]

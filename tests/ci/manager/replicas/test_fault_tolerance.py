from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.manager.replicas import jobs as replicas
from tests.manager.replicas.jobs import OldManager

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool, Ranks


_CI, _PROOF = pytest.mark.ci, pytest.mark.proof


ASYNC = pytest.mark.parametrize(
    "mode", ["async", pytest.param("disabled", marks=_PROOF), pytest.param("async_with_pinned_mem", marks=_CI)]
)


#: In CI: in one mode, in the others it is proof.
IN_CI = pytest.mark.parametrize(
    "mode",
    [
        pytest.param("async", marks=_CI),
        pytest.param("disabled", marks=_PROOF),
        pytest.param("async_with_pinned_mem", marks=_PROOF),
    ],
)


@IN_CI
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


@IN_CI
def test_all_begin_again(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """After a restart of all, each has its own of the step that is loaded: the losses are those of an unbroken run."""
    config = {"async_mode": mode}
    expected = ranks.run(4, replicas.unbroken, str(tmp_path / "a"), 9, config)
    ranks.run(4, replicas.unbroken, str(tmp_path / "b"), 5, config)
    results = ranks.run(4, replicas.restarted, str(tmp_path / "b"), 9, config)
    assert results == [(4, 4, losses[4:]) for losses in expected]
    assert expected[0] != expected[2]


@ASYNC
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


@IN_CI
def test_garbage_of_both_folders_is_collected(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """The newest stay, and of every step that stays for all, the loaders' places at that step; nothing foreign goes."""
    for name in ("ft-replicat-0", "ft-replicat-1"):
        (tmp_path / name / "notes").mkdir(parents=True)
        (tmp_path / name / "step-3.old").mkdir()
    for steps, first, second in ranks.run(4, replicas.retained, str(tmp_path), mode):
        assert steps == [15, 20, 25]
        assert first == second == [15, 20, 25, 26, 27]
    for name in ("ft-replicat-0", "ft-replicat-1"):
        assert (tmp_path / name / "notes").is_dir()
        assert (tmp_path / name / "step-3.old").is_dir()


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

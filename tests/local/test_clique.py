from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import CheckpointingException
from shardckpt.local import CliqueReplication
from shardckpt.local.inventory import Inventory
from shardckpt.local.parts import PartId, SaveId

if TYPE_CHECKING:
    from tests.ranks import RankPool


def _cliques(jump: int, factor: int) -> list[tuple[int, ...]]:
    replication = CliqueReplication(jump, factor)
    return [replication.clique_of(rank) for rank in range(dist.get_world_size())]


def test_cliques_are_a_jump_apart(ranks: RankPool) -> None:
    """Ranks r, r + jump, ... form a clique of factor ranks, and each rank is in one."""
    assert ranks.run(4, _cliques, 1, 2) == [[(0, 1), (0, 1), (2, 3), (2, 3)]] * 4
    assert ranks.run(4, _cliques, 2, 2) == [[(0, 2), (1, 3), (0, 2), (1, 3)]] * 4
    assert ranks.run(4, _cliques, 1, 4) == [[(0, 1, 2, 3)] * 4] * 4


@pytest.mark.parametrize(
    ("jump", "factor", "expected"),
    [
        (1, 3, "with jump=1 factor may be 2, 4"),
        (2, 3, "with jump=2 factor may be 2"),
        (4, 2, "with factor=2 jump may be 1, 2"),
        (3, 3, "jump=1 with factor=4 fits"),
        (0, 2, "at least 1"),
        (1, 1, "pass no replication"),
        (1, 2.0, "an integer"),
    ],
)
def test_other_cliques_are_refused(ranks: RankPool, jump: int, factor: Any, expected: str) -> None:
    """What does not divide the ranks is an error on all of them that says what would."""
    for outcome in ranks.outcomes(4, _cliques, jump, factor):
        assert outcome.kind == "CheckpointingException"
        assert expected in outcome.message


def _disagreeing() -> None:
    CliqueReplication(1 + dist.get_rank(), 2)


def test_ranks_agree_on_their_cliques(ranks: RankPool) -> None:
    """Different cliques on different ranks are an error on all."""
    for outcome in ranks.outcomes(2, _disagreeing):
        assert "ranks disagree on jump: 1 on rank 0, 2 on rank 1" in outcome.message


def test_one_process_has_no_clique() -> None:
    """A single rank cannot keep copies anywhere, and is told to leave them out."""
    with pytest.raises(CheckpointingException, match="pass no replication"):
        CliqueReplication(1, 2)


_saves = st.builds(SaveId, st.integers(0, 10**18 - 1), st.integers(0, 2**64 - 1), st.integers(1, 10**6))
_parts = st.builds(PartId, _saves, st.integers(0, 10**6))


@given(_parts)
def test_names_say_which_part(part: PartId) -> None:
    """A part's name gives the part back."""
    assert PartId.parse(part.name) == part


@given(_parts, st.sampled_from(["x", " ", "0", "-", "/", "\n", "1", "٣"]))
def test_names_are_matched_whole(part: PartId, more: str) -> None:
    """With anything in front, and with what is no digit behind, a name is no part's."""
    assert PartId.parse(more + part.name) is None
    assert PartId.parse(part.name.replace("step-", "step-0", 1)) is None or part.save.step == 0
    assert PartId.parse(part.name + more) is None or more in "01"


@pytest.mark.parametrize(
    "name", ["", "step-1", "step-1.old", "Step-1-" + 16 * "0" + "-rank-0-of-1", "step-" + 5000 * "1"]
)
def test_foreign_names_are_no_parts(name: str) -> None:
    """Step directories of other kinds are not taken for parts."""
    assert PartId.parse(name) is None


_some = st.builds(SaveId, st.integers(0, 5), st.integers(0, 3), st.just(2))
_disks = st.lists(st.sets(st.builds(PartId, _some, st.integers(0, 1)), max_size=12), min_size=2, max_size=2)


@given(_disks, _some, st.integers(1, 3))
def test_retention_keeps_what_is_newest(disks: list[set[PartId]], saved: SaveId, keep: int) -> None:
    """What goes is older than what was saved, and so many complete steps stay with it as there are, up to the limit."""
    disks = [disk | {PartId(saved, rank)} for rank, disk in enumerate(disks)]
    inventory = Inventory([dict.fromkeys(disk, "") for disk in disks])
    gone = inventory.superseded(saved, keep)
    assert all(save < saved for save in gone)
    stay = [save for save in inventory.complete if save not in gone]
    older = [save for save in inventory.complete if save.step < saved.step]
    assert saved in stay
    assert [save for save in stay if save.step < saved.step] == older[len(older) - min(keep - 1, len(older)) :]
    assert not [save for save in set(inventory.saves) - set(inventory.complete) - gone if save < saved]

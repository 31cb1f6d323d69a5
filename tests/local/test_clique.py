from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from shardckpt.errors import CheckpointingException
from shardckpt.local import CliqueReplication

if TYPE_CHECKING:
    from tests.ranks import Ranks


def _cliques(jump: int, factor: int) -> list[tuple[int, ...]]:
    replication = CliqueReplication(jump, factor)
    return [replication.clique_of(rank) for rank in range(dist.get_world_size())]


def test_cliques_are_a_jump_apart(ranks: Ranks) -> None:
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
        (1, 2.0, "a whole number"),
    ],
)
def test_other_cliques_are_refused(ranks: Ranks, jump: int, factor: Any, expected: str) -> None:
    """What does not divide the ranks is an error on all of them that says what would."""
    for outcome in ranks.outcomes(4, _cliques, jump, factor):
        assert outcome.kind == "CheckpointingException"
        assert expected in outcome.message


def _disagreeing() -> None:
    CliqueReplication(1 + dist.get_rank(), 2)


def test_ranks_agree_on_their_cliques(ranks: Ranks) -> None:
    """Different cliques on different ranks are an error on all."""
    for outcome in ranks.outcomes(2, _disagreeing):
        assert "ranks disagree on jump: 1 on rank 0, 2 on rank 1" in outcome.message


def test_one_process_has_no_clique() -> None:
    """A single rank cannot keep copies anywhere, and is told to leave them out."""
    with pytest.raises(CheckpointingException, match="pass no replication"):
        CliqueReplication(1, 2)

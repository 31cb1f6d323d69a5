"""Errors of coverage name experts by index."""

from __future__ import annotations

import re

import pytest

from shardckpt.errors import ShardingError
from shardckpt.planning.boxes import Box
from shardckpt_ep.coverage import Claim, check_claims
from tests.tables import table


def _claim(first: int, count: int, *, rows: int = 4, start: int = 0, main: bool = True) -> Claim:
    return Claim("w1", (9, 4), "torch.float32", 0, main, Box((first, start), (count, rows)))


@table(
    ("claims", "reason"),
    [
        ([[_claim(0, 3)], [_claim(4, 3), _claim(8, 1)]], r"experts 3, 7 of 'w1' are described by no rank"),
        ([[_claim(0, 2)], [_claim(6, 3)]], r"experts 2-5 of 'w1' are described by no rank"),
        ([[_claim(0, 6)], [_claim(6, 3, rows=3)]], r"experts 6-8 of 'w1' are described in part"),
        ([[_claim(0, 6)], [_claim(4, 5)]], r"experts 4, 5 of 'w1' are described by several ranks \(rank 0 and rank 1"),
        ([[_claim(0, 9)], [_claim(0, 9)._replace(shape=(8, 4))]], r"ranks disagree on .* shape \(9, 4\).*\(8, 4\)"),
        ([[_claim(0, 9)], [_claim(0, 9)._replace(expert_dim=1)]], r"experts along axis 0 on rank 0; .* 1 on rank 1"),
    ],
)
def test_faults_name_experts(claims: list[list[Claim]], reason: str) -> None:
    """Each expert that is missing, cut short or doubled stands in the error, runs of them as ranges."""
    with pytest.raises(ShardingError, match=re.escape("invalid sharding of experts:")) as caught:
        check_claims(claims)
    assert re.search(reason, str(caught.value))


def test_what_fits_is_no_fault() -> None:
    """Copies, and parts of one expert on several ranks, make up all experts."""
    halves = [_claim(6, 3, rows=2), _claim(6, 3, rows=2, start=2)]

    check_claims([[_claim(0, 6)], [_claim(0, 6, main=False)], halves[:1], halves[1:]])

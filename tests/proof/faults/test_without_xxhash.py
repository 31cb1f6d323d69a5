"""Ranks with and without xxhash: they save together all the same, and all hear the same where one cannot load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.storage.digest import CRC32
from tests import backends
from tests.faults import samples

pytest.importorskip("xxhash")
from tests.faults.without_xxhash import algorithm, outcomes

if TYPE_CHECKING:
    from pathlib import Path


@backends.both_in_proof
@pytest.mark.parametrize(
    ("verb", "have"),
    [("save", (1, 0)), ("save", (0, 1)), pytest.param("save in the background", (1, 0), marks=pytest.mark.ci)],
)
def test_a_save_by_ranks_of_which_one_lacks_it(tmp_path: Path, verb: str, have: tuple[int, int]) -> None:
    """Where any rank has none, all use CRC-32, and everyone loads and verifies what they save."""
    found = outcomes(f"{verb},load", tmp_path / "ckpt", *have)
    assert [outcome["error"] for outcome in found] == ["", ""]
    assert [outcome["has it"] for outcome in found][have.index(0)] is False
    assert algorithm(tmp_path / "ckpt") == CRC32
    assert samples.differences(samples.load(tmp_path / "ckpt"), 1) == []
    assert not [result for result in verify_checkpoint(tmp_path / "ckpt") if result.fault]

"""The source, broken in one way at a time: a test finds each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.mutations import MUTATIONS, check_baseline, try_mutation

if TYPE_CHECKING:
    from pathlib import Path


def test_a_mutation_is_caught_and_a_harmless_change_is_not(tmp_path: Path) -> None:
    """A wrong line is found out by the test that is named; a comment that is added is not."""
    chosen = next(each for each in MUTATIONS if each.file == "shardckpt/storage/digest.py")  # its test is short
    assert try_mutation(chosen, tmp_path) == "caught"
    assert try_mutation(chosen._replace(new=f"# a comment\n{chosen.old}"), tmp_path) == "survived"


@pytest.mark.timeout(3600)
def test_every_mutation_is_caught(tmp_path: Path) -> None:
    """Whatever of the mutations is made, the test that it names fails."""
    check_baseline()
    assert {each.what: found for each in MUTATIONS if (found := try_mutation(each, tmp_path)) != "caught"} == {}

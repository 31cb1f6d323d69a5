"""Ranks with and without xxhash: they save together all the same, and all hear the same where one cannot load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.storage.digest import CRC32
from tests import backends
from tests.faults import samples
from tests.names import RECORD

pytest.importorskip("xxhash")
from tests.faults.without_xxhash import algorithm, checkpoint, outcomes, saved

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["checkpoint", "saved"]  # fixtures


HINT = "pip install 'shardckpt[xxhash]'"


def errors(verb: str, target: Path, *have: int) -> set[str]:
    """The different errors of the ranks; ``""`` for none."""
    return {outcome["error"] for outcome in outcomes(verb, target, *have)}


@backends.both_in_proof
def test_a_process_without_it(tmp_path: Path) -> None:
    """One process that has none saves with CRC-32, loads, verifies and removes keys."""
    (outcome,) = outcomes("save,load,verify,remove,verify", tmp_path / "ckpt", 0)
    assert outcome == {"error": "", "family": True, "has it": False}
    assert algorithm(tmp_path / "ckpt") == CRC32


@backends.both_in_proof
@pytest.mark.parametrize("have", [(0,), pytest.param((1, 0), marks=pytest.mark.proof)])
def test_a_load_without_it(saved: Path, monkeypatch: pytest.MonkeyPatch, have: tuple[int, ...]) -> None:
    """A load by ranks of which any lacks it is one error with the way out; without checks the values are right."""
    (error,) = errors("load", saved, *have)
    assert error.startswith("CheckpointingException: ")
    assert f"{saved / RECORD}: " in error
    assert HINT in error
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", "0")
    assert errors("load", saved, *have) == {""}


@backends.both_in_proof
@pytest.mark.parametrize("verb", ["verify", "remove"])
def test_what_cannot_be_checked_is_not_called_sound(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Nothing is verified, nor anything removed, where digests cannot be computed, even where loads do not check."""
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", "0")
    before = samples.listing(checkpoint)
    (error,) = errors(verb, checkpoint, 0)
    assert error.startswith("CheckpointingException: ")
    assert HINT in error
    assert samples.listing(checkpoint) == before
    assert list(checkpoint.parent.iterdir()) == [checkpoint]

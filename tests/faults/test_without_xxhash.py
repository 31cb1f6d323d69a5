"""Ranks with and without xxhash: they save together all the same, and all hear the same where one cannot load."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest import Record
from shardckpt.storage.digest import CRC32, XXH3
from tests import backends, programs
from tests.faults import samples
from tests.names import RECORD

if TYPE_CHECKING:
    from tests.backends import Backend
    from tests.ranks import Ranks

MODULE = "tests.faults.without_xxhash"
HINT = "pip install 'shardckpt[xxhash]'"

pytest.importorskip("xxhash")


def outcomes(verb: str, target: Path, *have: int) -> list[dict[str, Any]]:
    """What every rank reports; ``have`` says which of them have xxhash."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            programs.start(
                "", verb, str(target), f"{folder}/group", str(rank), *map(str, have), module=MODULE, cwd=programs.ROOT
            )
            for rank in range(len(have))
        ]
        ended = [program.communicate(60) for program in started]
    assert [program.returncode for program in started] == [0] * len(have), ended
    found: list[dict[str, Any]] = [json.loads(out) for out, _ in ended]
    assert all(outcome["family"] for outcome in found), found
    return found


def errors(verb: str, target: Path, *have: int) -> set[str]:
    """The different errors of the ranks; ``""`` for none."""
    return {outcome["error"] for outcome in outcomes(verb, target, *have)}


def algorithm(target: Path) -> str:
    """Of a checkpoint's digests."""
    return Record.parse((target / RECORD).read_bytes()).digest_algorithm


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Path:
    """A checkpoint with digests by xxhash."""
    target = tmp_path_factory.mktemp("saved") / "ckpt"
    ranks.run(2, samples.save, str(target), 1)
    assert algorithm(target) == XXH3
    return target


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


@backends.both_in_proof
@pytest.mark.parametrize(
    ("verb", "have"),
    [("save", (1, 0)), ("save", (0, 1)), pytest.param("save in the background", (1, 0), marks=pytest.mark.ci)],
)
@pytest.mark.proof
def test_a_save_by_ranks_of_which_one_lacks_it(tmp_path: Path, verb: str, have: tuple[int, int]) -> None:
    """Where any rank has none, all use CRC-32, and everyone loads and verifies what they save."""
    found = outcomes(f"{verb},load", tmp_path / "ckpt", *have)
    assert [outcome["error"] for outcome in found] == ["", ""]
    assert [outcome["has it"] for outcome in found][have.index(0)] is False
    assert algorithm(tmp_path / "ckpt") == CRC32
    assert samples.differences(samples.load(tmp_path / "ckpt"), 1) == []
    assert not [result for result in verify_checkpoint(tmp_path / "ckpt") if result.fault]


@backends.both_in_proof
@pytest.mark.ci
def test_a_process_without_it(tmp_path: Path) -> None:
    """One process that has none saves with CRC-32, loads, verifies and removes keys."""
    (outcome,) = outcomes("save,load,verify,remove,verify", tmp_path / "ckpt", 0)
    assert outcome == {"error": "", "family": True, "has it": False}
    assert algorithm(tmp_path / "ckpt") == CRC32


@backends.both_in_proof
@pytest.mark.ci
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
@pytest.mark.ci
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

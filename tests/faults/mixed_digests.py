"""What ranks report of which some have no xxhash, and a checkpoint with its digests."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.manifest import Record
from shardckpt.storage.digest import XXH3
from tests import programs
from tests.faults import samples
from tests.names import RECORD

if TYPE_CHECKING:
    from tests.backends import Backend
    from tests.ranks import Ranks

MODULE = "tests.faults.without_xxhash"


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

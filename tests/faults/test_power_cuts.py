"""A power cut at any moment of a save leaves the old or the new; after the save has returned, the new."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.faults.disk_model import PAGE, Directory, Disk, File, policies

if TYPE_CHECKING:
    from pathlib import Path


def test_the_model_of_a_disk(tmp_path: Path) -> None:
    """Of a model disk that was cut, synced bytes and names are there, others as the policy says, renames whole."""
    disk, (nothing, everything) = Disk(), (lambda _: False, lambda _: True)
    disk.create("a", Directory())
    file = File()
    disk.create("a/one", file)
    file.pending.append((0, b"x" * PAGE * 2))
    disk.sync("a/one")
    file.pending.append((PAGE, b"y" * PAGE))
    disk.materialize(tmp_path / "1", nothing, nothing)
    assert not list((tmp_path / "1").iterdir())
    disk.sync("")
    disk.sync("a")
    disk.rename("a/one", "a/two")
    disk.materialize(tmp_path / "2", nothing, nothing)
    assert (tmp_path / "2/a/one").read_bytes() == b"x" * PAGE * 2
    disk.materialize(tmp_path / "3", everything, everything)
    assert (tmp_path / "3/a/two").read_bytes() == b"x" * PAGE + b"y" * PAGE
    for number, (names, data) in enumerate(policies(9, random.Random(1)).values()):
        disk.materialize(tmp_path / f"r{number}", names, data)
        assert len(list((tmp_path / f"r{number}/a").iterdir())) == 1

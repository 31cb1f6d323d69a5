"""Steps that a symbolic link of the folder leads to: ``best -> step-1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.manager import prune_steps
from shardckpt.manager.garbage_collection import GarbageCollector, discard_steps_after
from shardckpt.manager.retention import KeepLatest
from tests.manager import folders

if TYPE_CHECKING:
    from pathlib import Path


def test_a_linked_step_stays(tmp_path: Path) -> None:
    """Retention and prune leave it, a dry run says why, and a link that leads nowhere or elsewhere keeps nothing."""
    folders.save_all(tmp_path, 1, 2, 3)
    (tmp_path / "best").symlink_to("step-1")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("step-9")
    for dry_run in (True, False):
        kept = {each.step: each.kept for each in prune_steps(tmp_path, [KeepLatest(1)], dry_run=dry_run)}
        assert kept[1] == "best is a link to it"
        assert kept[2] == ""
    assert folders.names_in(tmp_path) == {"step-1", "step-3", "best", "loop", "gone"}
    collector = GarbageCollector(folders.steps_of(tmp_path), [KeepLatest(1)])
    collector.submit()
    collector.close()
    assert (tmp_path / "best" / "metadata.json").exists()


def test_a_discard_takes_linked_steps_too(tmp_path: Path) -> None:
    """A training that went back removes all later steps: a restart would load the newest of them."""
    folders.save_all(tmp_path, 1, 2)
    (tmp_path / "best").symlink_to("step-2")
    assert discard_steps_after(folders.steps_of(tmp_path), 1) == [2]

"""Sizes of checkpoints whose files are hard links: what they take, and what a removal would free."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardckpt.engine.locations import measure, measure_freed
from shardckpt.manager import list_checkpoints
from tests.manager import folders

if TYPE_CHECKING:
    from pathlib import Path


def test_a_hard_linked_checkpoint_has_its_size(tmp_path: Path) -> None:
    """``ls`` shows the bytes of all of its files, each once; to remove it alone frees none of them."""
    folders.save_all(tmp_path, 1)
    (tmp_path / "step-2").mkdir()
    for file in (tmp_path / "step-1").iterdir():
        os.link(file, tmp_path / "step-2" / file.name)
    sizes = [found.nbytes for found in list_checkpoints(tmp_path)]
    assert len(sizes) == 2
    assert sizes[0] == sizes[1] == sum(file.stat().st_size for file in (tmp_path / "step-1").iterdir())
    assert measure(tmp_path) == sizes[0]
    assert measure_freed(tmp_path / "step-2") == 0

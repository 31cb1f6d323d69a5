"""torchtitan's CheckpointManager of spring 2025: its constructor, keywords and names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import programs
from tests.manager.folders import steps_of

if TYPE_CHECKING:
    from pathlib import Path


_DROPPED = """
import gc, sys
from tests.compat.test_torchtitan import Job
job = Job(sys.argv[1], async_mode="async")
job.train(4)
del job
gc.collect()
"""


def test_a_dropped_manager_has_saved(tmp_path: Path) -> None:
    """Without ``close``, the save in the background is committed when the program ends, as the original's was."""
    done = programs.run(_DROPPED, str(tmp_path), cwd=programs.ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [step.step for step in steps_of(tmp_path / "checkpoint").committed()] == [1, 2, 4]

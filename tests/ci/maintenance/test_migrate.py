from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.cli import main
from tests import programs

if TYPE_CHECKING:
    from pathlib import Path

from tests.maintenance.migrate import content, loaded, old

__all__ = ["old"]  # fixtures


def test_a_kill_leaves_what_was_there(old: Path) -> None:
    """A migration of a checkpoint in place that dies half-way leaves the old one; run again, it succeeds."""
    before = content(old)
    arguments = ["migrate", "--overwrite", str(old), str(old)]
    code = f"from {__name__} import main, register; register(); main({arguments!r})"
    assert programs.run(code, cwd=programs.ROOT, environment={"MIGRATION": "die"}).returncode == 9
    assert content(old) == before
    assert main(arguments) == 0
    assert loaded(old) == (3.0, 1)

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.cli import main
from tests import programs
from tests.maintenance.migrate import content, loaded, old

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["old"]  # fixtures


def test_a_kill_leaves_what_was_there(old: Path) -> None:
    """A migration of a checkpoint in place that dies half-way leaves the old one; run again, it succeeds."""
    before = content(old)
    arguments = ["migrate", "--overwrite", str(old), str(old)]
    imports = "from shardckpt.cli import main; from tests.maintenance.migrate import register"
    code = f"{imports}; register(); main({arguments!r})"
    assert programs.run(code, cwd=programs.ROOT, environment={"MIGRATION": "die"}).returncode == 9
    assert content(old) == before
    assert main(arguments) == 0
    assert loaded(old) == (3.0, 1)

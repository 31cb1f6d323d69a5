"""What the tests of local manager share."""

from __future__ import annotations

from tests.local.disks import (
    make_manager,
)
from tests.logs import collect_warnings

MIB = 1 << 20


def latest_of(base: str, cliques: tuple[int, int] | None = None) -> tuple[int | None, list[str]]:
    """The newest iteration that a new manager finds, and its warnings."""
    manager = make_manager(base, cliques)
    with collect_warnings() as logged:
        return manager.find_latest(), logged

"""What the tests of state share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ep.cycles import save
from tests.ep.live import Case, Meshes, order

if TYPE_CHECKING:
    from pathlib import Path


HALVES = Case(order(("ep", 2)), kind="local")


def save_case(path: Path, case: Case) -> None:
    """Save the state of a case."""
    save(case, Meshes(), path)

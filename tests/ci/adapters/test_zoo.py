"""The zoo's models that come back, all in one, by a manager whose saves are written by another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.adapters import zoo

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings(f"ignore:{warning}") for warning in zoo.WARNINGS]


@backends.both
def test_another_process_stores_what_torch_does(tmp_path: Path) -> None:
    """Bits, dtypes, strides and types come back where another process writes what training has copied."""
    zoo.check_manager("mixed", tmp_path / "c", "async_with_pinned_mem")

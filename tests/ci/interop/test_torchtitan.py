"""torchtitan 0.3.0's own package: what its manager saves resumes here, and ours works on its base class."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.interop.torchtitan import script, site, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["site", "written"]  # fixtures

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan 0.3.0 needs Python 3.11"),
]


@pytest.mark.parametrize(
    ("mode", "world"),
    [
        ("disabled", 2),  # the loader, too
        *(
            pytest.param(*each, marks=pytest.mark.proof)
            for each in (("disabled", 1), ("disabled", 4), ("async", 1), ("async", 2), ("async", 4))
        ),
    ],
)
def test_what_torchtitans_manager_saved_resumes_here(
    site: Path, written: Callable[[str], Path], mode: str, world: int
) -> None:
    """Parts of a model, mixed optimizers, schedule and step come back on any number of ranks; on 2 the loader, too."""
    script(site, world, "resume", str(written(mode)))

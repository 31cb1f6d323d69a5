"""torchtitan 0.3.0's own package: what its manager saves resumes here, and ours works on its base class."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.interop.torchtitan import run, script, site, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["site", "written"]  # fixtures

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan 0.3.0 needs Python 3.11"),
]


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.proof), 2, pytest.param(4, marks=pytest.mark.proof)]
)
def test_our_manager_takes_over_a_job_of_torchtitan(
    site: Path, written: Callable[[str], Path], tmp_path: Path, world: int
) -> None:
    """TitanCheckpointManager, on the real base class, loads the step of torchtitan's manager, and saves the next."""
    shutil.copytree(written("disabled"), tmp_path / "job")
    script(site, world, "take_over", str(tmp_path / "job"))


def test_our_manager_works_on_the_real_base_class(site: Path) -> None:
    """The tests of TitanCheckpointManager that run on a stand-in pass with torchtitan's package in its place."""
    run(
        site, "-c", "import torchtitan.components.checkpointer as t; assert 'BaseCheckpointManager' in dir(t) and t.dcp"
    )
    run(site, "-m", "pytest", "-n", "0", "-q", "tests/integrations/test_torchtitan.py")

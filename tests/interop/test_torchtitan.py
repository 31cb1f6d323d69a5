"""torchtitan 0.3.0's own package: what its manager saves resumes here, and ours works on its base class."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.sites import Sites


pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan 0.3.0 needs Python 3.11"),
]


@pytest.fixture(scope="session")
def site(sites: Sites) -> Path:
    """The folder that has torchtitan, and what importing its manager, optimizers, schedulers and loader takes."""
    return sites("torchtitan-0.3.0")


def run(site: Path, *arguments: str) -> None:
    """Run Python with torchtitan on the path."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def script(site: Path, world: int, *arguments: str) -> None:
    """Do an action of ``torchtitan_script`` on so many ranks."""
    run(site, "-m", "tests.interop.torchtitan_script", str(world), *arguments)


@pytest.fixture(scope="session")
def written(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that torchtitan's own manager wrote on 2 ranks in a mode, once each."""
    folders: dict[str, Path] = {}

    def write(mode: str) -> Path:
        if mode not in folders:
            folder = tmp_path_factory.mktemp("torchtitan")
            script(site, 2, "write", str(folder), mode)
            folders[mode] = folder
        return folders[mode]

    return write


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


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.proof), 2, pytest.param(4, marks=pytest.mark.proof)]
)
@pytest.mark.proof
def test_our_manager_takes_over_a_job_of_torchtitan(
    site: Path, written: Callable[[str], Path], tmp_path: Path, world: int
) -> None:
    """TitanCheckpointManager, on the real base class, loads the step of torchtitan's manager, and saves the next."""
    shutil.copytree(written("disabled"), tmp_path / "job")
    script(site, world, "take_over", str(tmp_path / "job"))


@pytest.mark.proof
def test_our_manager_works_on_the_real_base_class(site: Path) -> None:
    """The tests of TitanCheckpointManager that run on a stand-in pass with torchtitan's package in its place."""
    run(
        site, "-c", "import torchtitan.components.checkpointer as t; assert 'BaseCheckpointManager' in dir(t) and t.dcp"
    )
    run(site, "-m", "pytest", "-n", "0", "-q", "tests/integrations/test_torchtitan.py")

"""What the tests of torchtitan share."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.sites import Sites


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

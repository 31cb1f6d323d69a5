"""What the tests of third party plugin share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.tree import ROOT

PLUGINS = Path(__file__).parent / "plugins"


OLD_DTYPES = ("float32", "int64", "bool")


class Environment:
    """A virtual environment that sees the packages of this one, with a release of the plugin or without."""

    def __init__(self, path: Path) -> None:
        venv.create(path, with_pip=False)  # ours installs into it
        self._python = path / "bin" / "python"
        self._installed = ""
        site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        self.package = site / "shardckpt_npy"
        ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [f"import site; site.addsitedir({parent!r})" for parent in sorted(ours)]
        (site / "parent.pth").write_text("\n".join(lines))

    def run(self, *arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run its Python."""
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "SHARDCKPT_DISABLED_PLUGINS": "", **variables}
        done = subprocess.run(
            [self._python, *arguments], env=variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 or not check, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done

    def session(self, *arguments: str, **variables: str) -> Any:
        """Run a part of tests/plugins/session.py; what it prints."""
        return json.loads(self.run("-m", "tests.plugins.session", *arguments, **variables).stdout)

    def shardckpt(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command; the result whatever its exit status is."""
        return self.run("-m", "shardckpt", *arguments, check=False, **variables)

    def install(self, release: str) -> None:
        """Make this release the installed one: ``npy_v1``, ``npy_v2``, ``zarr_v3``, or ``""`` for no npy."""
        if release == self._installed:
            return
        self._installed = "unknown"
        if release:
            options = ("--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall", "--quiet")
            self._pip("install", *options, str(PLUGINS / release))
        else:
            self._pip("uninstall", "--yes", "--quiet", "shardckpt-npy")
        self._installed = release

    def _pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self._python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"

    def damage(self, text: str) -> None:
        """Put a line at the top of the installed plugin's module, as a release that does not import has it."""
        module = self.package / "plugin.py"
        module.write_text(module.read_text().replace("from __future__ import annotations\n", f"{text}\n"))
        self._installed = "damaged"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment, without the plugin."""
    return Environment(tmp_path_factory.mktemp("venv") / "venv")


@pytest.fixture(scope="module")
def old(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that release 1.0 saved with 2 ranks, and loaded with 3."""
    path = tmp_path_factory.mktemp("checkpoints") / "old"
    environment.install("npy_v1")
    environment.session("save", "npy", str(path), *OLD_DTYPES)
    return path


@pytest.fixture(scope="module")
def migrated(environment: Environment, old: Path) -> tuple[Path, str]:
    """The same checkpoint as release 2.0 rewrites it, and what the command printed."""
    path = old.with_name("migrated")
    environment.install("npy_v2")
    done = environment.shardckpt("migrate", str(old), str(path))
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def rows_of(listing: str) -> list[list[str]]:
    """The rows of the plugin in a listing."""
    return [line.split() for line in listing.splitlines() if line.startswith("npy ")]

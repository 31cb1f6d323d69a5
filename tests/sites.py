"""Releases of other libraries, each in a folder of its own: tests find them, and install nothing.

``python -m tests.sites FOLDER`` installs from PyPI what ``.ci/sites.txt`` lists and ``FOLDER`` does not have yet, with
``--proof`` also what the proof tier alone needs. Tests find the folder by ``SHARDCKPT_TEST_SITES``; without it, or
without the site, a test is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.tree import ROOT

LIST = ROOT / ".ci" / "sites.txt"
#: What the fixture ``sites`` is: a site's path by its name, or the test is skipped.
Sites = Callable[[str], Path]
#: The variable that names the folder.
VARIABLE = "SHARDCKPT_TEST_SITES"
_TIMEOUT = 240.0  # seconds
#: Wheels alone, and no dependencies: nothing is built, and torch and numpy are those of the tests.
_INSTALL = ("uv", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--python", sys.executable)


#: What a line of a site begins with that the proof tier alone needs.
_PROOF = "proof:"


class SiteError(Exception):
    """A site is not listed, or could not be installed."""


def list_sites(*, proof: bool = True) -> dict[str, list[str]]:
    """Return each site's requirements; without ``proof`` not of those that the proof tier alone needs."""
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    kept = [line.removeprefix(_PROOF).split() for line in lines if proof or not line.startswith(_PROOF)]
    return {name: packages for name, *packages in kept}


def find(name: str, folder: Path | None = None) -> Path | None:
    """Return a site's path in a folder, by default the one that ``SHARDCKPT_TEST_SITES`` names; None if it is absent.

    Raises:
        SiteError: ``.ci/sites.txt`` does not list the site.
    """
    if name not in list_sites():
        raise SiteError(f"{LIST} does not list {name!r}: it has {', '.join(list_sites())}")
    folder = folder or Path(os.environ.get(VARIABLE) or "/nonexistent")
    return folder / name if (folder / name).is_dir() else None


def install(name: str, folder: Path) -> Path:
    """Return a site's path in a folder, where it is installed from PyPI if it is absent.

    Raises:
        SiteError: ``.ci/sites.txt`` does not list the site, or uv failed.
    """
    site = find(name, folder)
    if site is not None:
        return site
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch, "site")
        command = [sys.executable, "-m", *_INSTALL, "--target", str(target), *list_sites()[name]]
        # each version is exact, and may differ from the one that the tests themselves run with
        environment = {key: value for key, value in os.environ.items() if key != "UV_CONSTRAINT"}
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True, env=environment)
        except subprocess.TimeoutExpired:
            raise SiteError(f"uv took longer than {_TIMEOUT:g} s to install {name}") from None
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or ["it failed"])[-1]
            raise SiteError(f"uv could not install {name}: {reason}") from error
        try:
            target.rename(folder / name)
        except OSError:
            if not (folder / name).is_dir():  # else another process has installed the same meanwhile
                raise
    return folder / name


if __name__ == "__main__":
    for _name in list_sites(proof="--proof" in sys.argv):
        install(_name, Path(sys.argv[1]).absolute())

"""A release of megatron-core in folders of its own, as tests/interop keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.group import ROOT

RELEASE = "0.16.1"
#: Where the tests keep theirs.
FOLDER = ROOT / ".pytest_cache" / "d" / "shardckpt-megatron"
_SITES = {
    f"megatron-core-{RELEASE}": [f"megatron-core=={RELEASE}"],
    "needs": ["numpy", "packaging", "einops", "psutil", "setuptools<81"],
}
_TIMEOUT = 240.0  # seconds


class NoMegatronError(Exception):
    """It cannot be had."""


def python_path(folder: Path) -> str:
    """PYTHONPATH for processes that import megatron; what is not in ``folder`` is installed there from PyPI."""
    folder.mkdir(parents=True, exist_ok=True)
    sites = [_installed(folder / name, packages) for name, packages in _SITES.items()]
    return os.pathsep.join([*map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])])


def _installed(site: Path, packages: list[str]) -> Path:
    if site.is_dir():
        return site
    with tempfile.TemporaryDirectory(dir=site.parent) as scratch:
        target = Path(scratch, "site")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        command += ["--target", str(target), *packages]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise NoMegatronError(f"pip took longer than {_TIMEOUT:.0f} s") from None
        if done.returncode:
            raise NoMegatronError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
        try:
            target.rename(site)
        except OSError:
            if not site.is_dir():  # else another process has installed the same meanwhile
                raise
    return site


__all__ = ["FOLDER", "RELEASE", "NoMegatronError", "python_path"]

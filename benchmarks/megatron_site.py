"""A release of megatron-core in folders of its own, as the tests have it."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.group import ROOT
from tests import sites

RELEASE = "0.16.1"
#: Where it is installed if the option ``--megatron`` names no other folder.
FOLDER = Path(os.environ.get(sites.VARIABLE) or ROOT / ".pytest_cache" / "d" / "sites")


def python_path(folder: Path) -> str:
    """PYTHONPATH for processes that import megatron; what is not in ``folder`` is installed there from PyPI.

    Raises:
        SiteError: It cannot be had.
    """
    found = [sites.install(name, folder) for name in (f"megatron-core-{RELEASE}", "megatron-needs")]
    return os.pathsep.join([*map(str, found), *filter(None, [os.environ.get("PYTHONPATH")])])


__all__ = ["FOLDER", "RELEASE", "python_path"]

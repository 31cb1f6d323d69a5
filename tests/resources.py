"""What this process has open in one folder: all that it has open changes with the threads and caches of other tests."""

from __future__ import annotations

import contextlib
from pathlib import Path


def list_open(folder: Path) -> list[str]:
    """Return what descriptors of this process lead to of a folder and what is in it, once for each descriptor."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor by which the folder is listed
            path = link.readlink()
            if path.is_relative_to(folder):
                found.append(str(path))
    return found


__all__ = ["list_open"]

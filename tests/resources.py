"""What this process has open in one folder, and our threads: all else changes with the threads and caches of others."""

from __future__ import annotations

import contextlib
import threading
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


def list_threads(prefix: str = "shardckpt") -> set[threading.Thread]:
    """Return the running threads of shardckpt: their names begin with its own."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(prefix)}


__all__ = ["list_open", "list_threads"]

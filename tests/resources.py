"""What this process has open in one folder, our threads, and our reads: all else changes with what others do."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


class Read(NamedTuple):
    """A call that has read a part of a file."""

    name: str
    offset: int
    nbytes: int


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Return a list that gets every read of a file from now on."""
    reads, call = list[Read](), os.preadv

    def watched(fd: int, buffers: list[memoryview], offset: int) -> int:
        done = call(fd, buffers, offset)
        reads.append(Read(Path(f"/proc/self/fd/{fd}").readlink().name, offset, done))
        return done

    monkeypatch.setattr(os, "preadv", watched)
    return reads


def list_open(folder: Path) -> list[str]:
    """Return what descriptors of this process lead to of a folder and what is in it, once for each descriptor."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor by which the folder is listed
            path = link.readlink()
            if path.is_relative_to(folder):
                found.append(str(path))
    return found


@contextlib.contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Let this process open so many more files."""
    used = {int(link.name) for link in Path("/proc/self/fd").iterdir()}
    free = itertools.islice((number for number in itertools.count() if number not in used), count, None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(free), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread start, as in a container that has as many as it may have."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def list_threads(prefix: str = "shardckpt") -> set[threading.Thread]:
    """Return the running threads of shardckpt: their names begin with its own."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(prefix)}


__all__ = ["Read", "few_descriptors", "list_open", "list_threads", "refuse_threads", "watch_reads"]

"""Processes that own temporary directories: dead ones, living ones, and those of other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from shardckpt.commit.owner import Owner, _read_stat
from shardckpt.commit.staging_names import STAGING, new_save_id, temporary_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Makes a staging directory for the path that it is given, says so, and waits for the end of its input.
_SAVER = """
import sys
from pathlib import Path
from shardckpt.commit import commit
staging = commit.create_staging(Path(sys.argv[1]), "0" * 32)
(staging / "data").write_bytes(b"so far")
print(staging.name, flush=True)
sys.stdin.read()
"""


def dead() -> Owner:
    """A process of this host that has ended: none has this id, which is above Linux's most, 2 ** 22."""
    return Owner.current()._replace(pid=1 << 30)


def living() -> Owner:
    """Another living process of this host: that which started the tests."""
    parent = os.getppid()
    return Owner.current()._replace(pid=parent, start=_read_stat(str(parent))[1])


@contextmanager
def alive() -> Iterator[Owner]:
    """An owner that this process takes for a living process of this host until the block ends, and then for dead."""
    owner, look = dead()._replace(pid=(1 << 30) + 1), Owner.is_alive
    with patch.object(Owner, "is_alive", lambda asked: asked == owner or look(asked)):
        yield owner


def elsewhere() -> Owner:
    """A process of another host."""
    current = Owner.current()
    return current._replace(host=current.host ^ 1)


def leave(target: Path, owner: Owner | None, kind: str = STAGING, *, discarded: bool = False) -> Path:
    """What a process leaves beside a target; with no owner, one of an older release."""
    name = temporary_name(target.name, kind, new_save_id(), owner)
    if owner is None:
        name = name[:-33]
    path = target.with_name(name + "-discarded" * discarded)
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"so far")
    return path


def saver(target: Path) -> tuple[subprocess.Popen[str], Path]:
    """A living process in the midst of a save, and its staging directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SAVER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, target.with_name(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    """Kill it, and wait for its end."""
    process.kill()
    process.communicate(timeout=60)

"""Where tests make their folders: in memory where there is room, and on a disk where a test asks for one."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Where pytest makes the folders of ``tmp_path``; a user's own choice stands.
ROOT = "PYTEST_DEBUG_TEMPROOT"
#: Where folders on a disk are made: the temporary directory that the run was started with.
DISK = "SHARDCKPT_TEST_DISK"
_MEMORY = Path("/dev/shm")
#: A run with two workers needs less than 2 GB at a time.
_ROOM = 8 << 30  # bytes


def choose() -> None:
    """Choose the folders of this run, or take over those that the process chose which started this worker."""
    os.environ.setdefault(DISK, tempfile.gettempdir())
    if _has_room():
        os.environ.setdefault(ROOT, str(_MEMORY))
    if "PYTEST_XDIST_WORKER" in os.environ:  # tests look at what is left there: what others leave is theirs
        folder = tempfile.mkdtemp(prefix=_prefix(), dir=os.environ.get(ROOT))
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        Path(folder).chmod(0o755)  # for programs that go on as another user
        # after multiprocessing has removed what it has there, at its priority of -100
        Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


@contextmanager
def on_disk() -> Iterator[Path]:
    """Lend an empty folder on a disk, for what a file system in memory does not have: direct and lost writes."""
    with tempfile.TemporaryDirectory(prefix=_prefix(), dir=os.environ[DISK]) as folder:
        yield Path(folder)


def _prefix() -> str:
    """Return how names of folders begin: with the process's number, by which .ci/run finds those of killed runs."""
    return f"shardckpt-tests-{os.getpid()}-"


def _has_room() -> bool:
    """Whether the file system in memory and memory itself have room for a run."""
    if not _MEMORY.is_dir() or not os.access(_MEMORY, os.W_OK):
        return False
    available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return min(int(available[1]) << 10 if available else 0, shutil.disk_usage(_MEMORY).free) >= _ROOM

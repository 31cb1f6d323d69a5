"""Directories that are held open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import programs

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = """
import sys, threading, weakref
from pathlib import Path
from shardckpt.storage import open_directory

class Owner: pass
owners = [Owner() for _ in range(200_000)]
for owner in owners:  # so many that Python is long about them at exit
    weakref.finalize(owner, len, "")

begun = threading.Event()
def open_and_close():
    while True:
        some = [open_directory(Path(sys.argv[1])) for _ in range(500)]
        begun.set()

threading.Thread(target=open_and_close, daemon=True).start()
begun.wait()
"""


def test_a_program_may_end_while_a_thread_opens_directories(tmp_path: Path) -> None:
    """The thread of a manager that removes old checkpoints does not disturb the end of the program."""
    done = programs.run(_PROGRAM, str(tmp_path))
    assert done.returncode == 0
    assert done.stderr == ""

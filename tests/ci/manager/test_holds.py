"""What holds a step: leases of readers and pins, against every removal by a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import programs
from tests.manager import folders
from tests.manager.holds import collect_newest

if TYPE_CHECKING:
    from pathlib import Path


def test_the_lease_of_a_dead_process_ends(tmp_path: Path) -> None:
    """A process that dies with a lease keeps the step no longer, and leaves nothing behind."""
    folders.save_all(tmp_path, 1, 2)
    done = programs.run(
        "import os, sys\n"
        "from shardckpt.manager import lease_step\n"
        "lease = lease_step(sys.argv[1], 1, seconds=3600)\n"
        "print(lease.is_held, flush=True)\n"
        "os._exit(1)\n",
        str(tmp_path),
    )
    assert done.stdout == "True\n", done.stderr
    assert len(list((tmp_path / folders.HOLDS).iterdir())) == 1
    assert collect_newest(tmp_path) == [1]
    assert folders.names_in(tmp_path) == {"step-2"}

"""Whether the process lives that a temporary directory belongs to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardckpt.commit.owner import Owner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say when a process started")


def _owner(process: subprocess.Popen[bytes]) -> Owner:
    """As the process itself would say it."""
    start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return Owner.current()._replace(pid=process.pid, start=start)


def test_a_process_lives_until_it_is_dead() -> None:
    """Running and stopped ones live; a killed one does not, neither before nor after its parent has looked."""
    process = subprocess.Popen(["sleep", "60"])
    owner = _owner(process)
    assert Owner.current().is_alive()
    assert owner.is_alive()
    process.send_signal(signal.SIGSTOP)
    assert owner.is_alive()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has looked
    assert Path(f"/proc/{process.pid}").exists()  # a zombie
    assert owner.is_alive() is False
    process.wait(30)
    assert owner.is_alive() is False


def test_another_container_is_another_host() -> None:
    """A process in a namespace of its own, with this host's name, judges none of this one's, nor the other way."""
    said, own = _in_a_namespace("--mount-proc", sys.executable, "-c", _INSIDE, Owner.current().text).split()
    assert said == "None"
    assert Owner.from_text(own).is_alive() is None


def _in_a_namespace(*command: str) -> str:
    """What a command, behind options of unshare, prints in a namespace of process ids of its own."""
    inside = subprocess.run(
        ["unshare", "--pid", "--fork", *command], capture_output=True, text=True, timeout=60, check=False
    )
    if inside.returncode and "unshare" in inside.stderr:
        pytest.skip(f"no namespaces here: {inside.stderr}")
    return inside.stdout


_INSIDE = """
import sys
from shardckpt.commit.owner import Owner
print(Owner.from_text(sys.argv[1]).is_alive(), Owner.current().text)
"""


def test_a_foreign_proc_proves_nothing() -> None:
    """Where /proc shows the ids of another namespace, who has an id may be alive, and is not judged by its start."""
    program = "import os, sys\nfrom shardckpt.commit.owner import Owner\nown = Owner.current()\n"
    program += "print(own._replace(start=own.start + 1).is_alive())"
    assert _in_a_namespace(sys.executable, "-c", program).strip() == "True"

"""The process that owns a temporary directory, encoded in the directory's name: others can check whether it is alive.

A process id alone is not enough: ids are reused, and two containers or hosts that share a file system have the same
ones. So the name also has a digest of the host, its boot and the namespaces, and the start time of the process.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from shardckpt.errors import StorageError
from shardckpt.storage.filesystem import is_there

_HOST_BYTES = 6
_START_MASK = (1 << 48) - 1  # a name has 48 bits of the start time
_PROC = Path("/proc")

#: Names of the temporary directories in use by this process. Others with this process as owner are of failed calls.
_claimed: set[str] = set()


class Owner(NamedTuple):
    """A process, by its id in its namespace, and its start time in clock ticks since the boot.

    ``host`` is a digest of the host's name, its boot, and the namespaces that give process ids and start times their
    meaning. Host or start is 0 if the system does not say it.
    """

    host: int
    pid: int
    start: int

    @classmethod
    def current(cls) -> Owner:
        """Return this process."""
        try:
            _, start = _status("self")
        except OSError:
            start = 0
        return cls(_host(), os.getpid(), start)

    @classmethod
    def from_text(cls, text: str) -> Owner:
        """Return the process with this :attr:`text`."""
        return cls(int(text[:12], 16), int(text[12:20], 16), int(text[20:], 16))

    @property
    def text(self) -> str:
        """The process as 32 hex digits, for a name: 12 of the host, 8 of the id, 12 of the start time."""
        return f"{self.host:012x}{self.pid:08x}{self.start & _START_MASK:012x}"

    def is_alive(self) -> bool | None:
        """Return whether the process is alive; None if it is of another host, boot or container, and unknown here.

        False is certain: the caller may delete what the process owned. True may be wrong for a process that ends at
        this moment, or that the system hides.
        """
        if not self.host or self.host != _host():
            return None
        try:
            os.kill(self.pid, 0)  # signal 0 is not sent: it only asks whether the process exists
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # it exists, and belongs to another user
        try:
            if (_PROC / "self").readlink().name != str(os.getpid()):
                return True  # /proc is of another pid namespace, where the id is another process's
            state, start = _status(str(self.pid))
            if self.start and start & _START_MASK != self.start:
                return False  # the id was reused
            # a killed process is a zombie (Z) until its parent waits for it; with other threads left it still runs
            return state not in "ZX" or len(list((_PROC / str(self.pid) / "task").iterdir())) > 1
        except OSError:  # it ended in between, or is hidden from other users (hidepid)
            return True


def claim_name(name: str) -> None:
    """Note that this process uses the temporary directory: garbage collection in other threads keeps it."""
    _claimed.add(name)


def release_name(name: str) -> None:
    """End the use of a temporary directory; without effect if it was not claimed."""
    _claimed.discard(name)


def is_claimed(name: str) -> bool:
    """Return whether this process uses the temporary directory of that name now."""
    return name in _claimed


def _host() -> int:
    """Return a digest that identifies this host, boot and container; 0 if the system does not say."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        pids = (_PROC / "self/ns/pid").readlink()
        clock = _PROC / "self/ns/time"
        times = clock.readlink() if is_there(clock) else ""
    except (OSError, StorageError):
        return 0
    digest = hashlib.sha256(repr((os.uname().nodename, boot, pids, times)).encode()).digest()
    return int.from_bytes(digest[:_HOST_BYTES], "little") or 1


def _status(process: str) -> tuple[str, int]:
    """Return the state and start time of a process; an OSError if it does not exist."""
    # the fields after the last parenthesis, because a process name may have any bytes
    fields = (_PROC / process / "stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])

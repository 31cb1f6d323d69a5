"""The process that owns a temporary directory, encoded in the directory's name: others check whether it is alive.

A process id alone identifies no process: a host reuses ids, and hosts and containers that share a file system have
equal ids. So the name also has the start time of the process, and a digest of the host, the boot and the namespaces.
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

#: Names of the temporary directories that this process uses. A directory owned by this process and not in here was left
#: by a failed call, and may be removed.
_claimed: set[str] = set()


class Owner(NamedTuple):
    """A process on a host.

    Attributes:
        host: A digest of the host's name, the boot, and the namespaces of process ids and start times. 0 if the system
            does not tell these: then :meth:`is_alive` returns None.
        pid: The process id in its namespace.
        start: The start time in clock ticks since the boot. 0 if the system does not tell it: then a reused process id
            passes for the process.
    """

    host: int
    pid: int
    start: int

    @classmethod
    def current(cls) -> Owner:
        """Return this process."""
        try:
            _, start = _read_stat("self")  # not os.getpid(): /proc may be of another pid namespace
        except OSError:
            start = 0
        return cls(_digest_host(), os.getpid(), start)

    @classmethod
    def from_text(cls, text: str) -> Owner:
        """Return the owner with this :attr:`text`."""
        return cls(int(text[:12], 16), int(text[12:20], 16), int(text[20:], 16))

    @property
    def text(self) -> str:
        """The owner as 32 hex digits, for a name: 12 of the host, 8 of the id, 12 of the start time."""
        return f"{self.host:012x}{self.pid:08x}{self.start & _START_MASK:012x}"

    def is_alive(self) -> bool | None:
        """Return False if the process has certainly ended, True if it is alive or hidden, None if it is out of sight.

        After False the caller may delete the files that the process owned. True may be wrong for a process that ends at
        this moment, or that the system hides from this user. None stands for a process of another host, boot or
        container.
        """
        if not self.host or self.host != _digest_host():
            return None
        try:
            os.kill(self.pid, 0)  # signal 0 is never delivered: the call only tells whether the process exists
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # the process exists, and belongs to another user
        try:
            if (_PROC / "self").readlink().name != str(os.getpid()):
                return True  # /proc is of another pid namespace, where the id is another process's
            state, start = _read_stat(str(self.pid))
            if self.start and start & _START_MASK != self.start:
                return False  # the id was reused
            # a dead process is a zombie (Z) until the parent waits for it; one with further threads still runs
            return state not in "ZX" or len(list((_PROC / str(self.pid) / "task").iterdir())) > 1
        except OSError:  # the process ended in between, or is hidden from other users (hidepid)
            return True


def claim_name(name: str) -> None:
    """Note that this process uses the temporary directory: cleanups in other threads keep a claimed one."""
    _claimed.add(name)


def release_name(name: str) -> None:
    """End the use of a temporary directory; without effect if it was not claimed."""
    _claimed.discard(name)


def is_claimed(name: str) -> bool:
    """Return whether this process uses the temporary directory of that name now."""
    return name in _claimed


def _digest_host() -> int:
    """Return a digest that identifies this host, boot and container; 0 if the system does not tell them."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        pids = (_PROC / "self/ns/pid").readlink()
        clock = _PROC / "self/ns/time"
        times = clock.readlink() if is_there(clock) else ""
    except (OSError, StorageError):
        return 0
    digest = hashlib.sha256(repr((os.uname().nodename, boot, pids, times)).encode()).digest()
    return int.from_bytes(digest[:_HOST_BYTES], "little") or 1  # 0 means unknown


def _read_stat(process: str) -> tuple[str, int]:
    """Return the state and start time of a process, given by its id or as "self"; an OSError if it does not exist."""
    # Field 2 of proc_pid_stat(5) is the name in parentheses, which may have any bytes: spaces and parentheses, too. So
    # fields are counted from the last parenthesis on.
    fields = (_PROC / process / "stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])  # fields 3 and 22

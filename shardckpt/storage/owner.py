"""The process that a temporary directory belongs to, as its name says it: others can tell whether that process lives.

A process id alone does not: ids are used again, and two containers or hosts that share a file system have the same
ones. So the name also says on which boot of which host, in which namespaces, and when the process started.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

#: Bits of the three fields; together 128, 32 digits in hex.
_HOST_BITS, _PID_BITS, _START_BITS = 48, 32, 48
_PROC = Path("/proc")

#: Names of the temporary directories that this process fills or moves now. What else has its name, a failed call left.
_claimed: set[str] = set()


class Owner(NamedTuple):
    """A process.

    Attributes:
        host: Digest of the host's name, its boot, and the namespaces that give process ids and start times their
            meaning; 0 where the system does not tell.
        pid: Process id in its namespace.
        start: When it started, in clock ticks since the boot; 0 where the system does not tell.
    """

    host: int
    pid: int
    start: int

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        try:
            _, start = _status("self")
        except OSError:
            start = 0
        return cls(_host(), os.getpid(), start)

    @classmethod
    def from_number(cls, number: int) -> Owner:
        """The process that has this :attr:`number`."""
        start = number & (1 << _START_BITS) - 1
        pid = number >> _START_BITS & (1 << _PID_BITS) - 1
        return cls(number >> _START_BITS + _PID_BITS, pid, start)

    @property
    def number(self) -> int:
        """The process as a number of 128 bits."""
        start = self.start & (1 << _START_BITS) - 1
        return (self.host << _PID_BITS | self.pid) << _START_BITS | start

    @property
    def text(self) -> str:
        """The process as 32 hex digits, for a name."""
        return f"{self.number:032x}"

    def is_alive(self) -> bool | None:
        """Whether the process lives; None for one of another host, boot or container, of which nothing is known here.

        False is certain. True may be said of a process that ends at this moment, or that the system hides.
        """
        if not self.host or self.host != _host():
            return None
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # there is one, of another user
        try:
            if (_PROC / "self").readlink().name != str(os.getpid()):
                return True  # /proc is that of another namespace, in which the id is another process's
            state, start = _status(str(self.pid))
            if start & (1 << _START_BITS) - 1 != self.start:
                return False  # the id was used again
            # a process that was killed keeps its id until its parent looks; while it has other threads it still runs
            return state not in "ZX" or len(list((_PROC / str(self.pid) / "task").iterdir())) > 1
        except OSError:  # gone in between, or hidden from other users (hidepid)
            return True


def claim(name: str) -> None:
    """Note that this process fills or moves the temporary directory of that name, which no other has, from now on."""
    _claimed.add(name)


def release(name: str) -> None:
    """Note that it does so no longer; to release what was not claimed has no effect."""
    _claimed.discard(name)


def is_claimed(name: str) -> bool:
    """Whether this process fills or moves the temporary directory of that name now."""
    return name in _claimed


def _host() -> int:
    """What tells this host, boot and container from all others; 0 where that is not known."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        pids = (_PROC / "self/ns/pid").readlink()
        clock = _PROC / "self/ns/time"
        times = clock.readlink() if os.path.lexists(clock) else ""
    except OSError:
        return 0
    digest = hashlib.sha256(repr((os.uname().nodename, boot, pids, times)).encode()).digest()
    return int.from_bytes(digest[: _HOST_BITS // 8], "little") or 1


def _status(process: str) -> tuple[str, int]:
    """State and start of a process; an OSError if there is none."""
    fields = (_PROC / process / "stat").read_bytes().rpartition(b")")[2].split()  # its name may have any bytes
    return fields[0].decode(), int(fields[19])


__all__ = ["Owner", "claim", "is_claimed", "release"]

"""What the figures were measured on, and its page cache."""

from __future__ import annotations

import datetime as dt
import os
import platform
from pathlib import Path

_DROP = Path("/proc/sys/vm/drop_caches")
_CHUNK = 8 << 20


def describe(directory: Path) -> list[str]:
    """Lines about the machine, the time, and how busy it is."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    when = f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d %H:%M} UTC"
    lines = [
        f"{when}, {platform.node()}: {_processor()}, {cores} cores, {gib:.0f} GiB",
        f"Linux {platform.release()}, Python {platform.python_version()}",
        f"files on {_file_system(directory)}; load average {load:.2f} at the start",
    ]
    if load > cores / 2:
        lines.append("THE MACHINE IS BUSY: read ratios with care, and no seconds")
    return lines


def on_tmpfs(directory: Path) -> bool:
    """Whether files there live in memory."""
    return _file_system(directory).startswith("tmpfs")


def can_drop_caches() -> bool:
    """Whether the page cache can be emptied: as root."""
    return os.access(_DROP, os.W_OK)


def drop_caches() -> None:
    """Write out and empty the page cache of the whole machine."""
    os.sync()
    _DROP.write_text("1")


def warm(path: Path) -> None:
    """Read every file below a path, so that the page cache has it."""
    buffer = bytearray(_CHUNK)
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """Type and device of the mount that a directory lies on."""
    best = ("", "unknown", "")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind, *_ = line.split()
        if directory.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind, device)
    return f"{best[1]} ({best[2]})"


__all__ = ["can_drop_caches", "describe", "drop_caches", "on_tmpfs", "warm"]

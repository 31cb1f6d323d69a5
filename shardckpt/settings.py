"""Every environment variable that shardckpt reads: its name, default and meaning."""

from __future__ import annotations

import os

from shardckpt.errors import CheckpointingException

#: 1 writes large tensors past the page cache where the file system can (the default), 0 does not.
DIRECT_IO = "SHARDCKPT_DIRECT_IO"
#: Comma-separated entry-point names of plugins to leave out.
DISABLED_PLUGINS = "SHARDCKPT_DISABLED_PLUGINS"
#: Threads that read or write files, a rank; 1 does all file work in the calling thread.
IO_THREADS = "SHARDCKPT_IO_THREADS"
#: Hours since the last write after which what an interrupted save has left is removed, where it cannot be seen whether
#: its process lives: it is another host's, or an older release's. What no process of this host has goes at once.
LEFTOVER_HOURS = "SHARDCKPT_LEFTOVER_HOURS"
#: Attempts at a request to a remote store, with growing pauses, before it is an error.
REMOTE_ATTEMPTS = "SHARDCKPT_REMOTE_ATTEMPTS"
#: Threads that read from a remote store, a rank: more than cores, for they wait.
REMOTE_THREADS = "SHARDCKPT_REMOTE_THREADS"
#: Directory on the machine's own disk where what goes to a remote store is written first; by default the system's.
SPOOL_DIR = "SHARDCKPT_SPOOL_DIR"
#: Background saves of which copies may wait in memory at a time; the next one waits for the first to be written.
STAGED_SAVES = "SHARDCKPT_STAGED_SAVES"
#: 1 checks the digests of what is read (the default), 0 does not.
VERIFY_READS = "SHARDCKPT_VERIFY_READS"


def direct_io() -> bool:
    """Whether large writes bypass the page cache where they can."""
    return bool(_integer(DIRECT_IO, default=1, least=0))


def disabled_plugins() -> frozenset[str]:
    """Names of the plugins that the user switched off."""
    names = os.environ.get(DISABLED_PLUGINS, "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


def io_threads() -> int:
    """Number of file threads a rank; by default one a core, 2 at least and 4 at most."""
    return _integer(IO_THREADS, default=max(2, min(4, os.cpu_count() or 1)), least=1)


def leftover_hours() -> int:
    """Hours after which an interrupted save of another host is taken for dead."""
    return _integer(LEFTOVER_HOURS, default=24, least=1)


def remote_attempts() -> int:
    """How often a request to a remote store is tried."""
    return _integer(REMOTE_ATTEMPTS, default=5, least=1)


def remote_threads() -> int:
    """Number of threads a rank that read from a remote store."""
    return _integer(REMOTE_THREADS, default=16, least=1)


def spool_directory() -> str | None:
    """Where files wait to be uploaded; None is the system's directory for temporary files."""
    return os.environ.get(SPOOL_DIR) or None


def staged_saves() -> int:
    """Number of background saves that are staged at a time."""
    return _integer(STAGED_SAVES, default=2, least=1)


def verify_reads() -> bool:
    """Whether a load checks the digests of the bytes it reads."""
    return bool(_integer(VERIFY_READS, default=1, least=0))


def _integer(name: str, *, default: int, least: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise CheckpointingException(f"{name}={text!r}: expected a whole number of at least {least}")
    return int(text)


__all__ = [
    "DIRECT_IO",
    "DISABLED_PLUGINS",
    "IO_THREADS",
    "LEFTOVER_HOURS",
    "REMOTE_ATTEMPTS",
    "REMOTE_THREADS",
    "SPOOL_DIR",
    "STAGED_SAVES",
    "VERIFY_READS",
    "direct_io",
    "disabled_plugins",
    "io_threads",
    "leftover_hours",
    "remote_attempts",
    "remote_threads",
    "spool_directory",
    "staged_saves",
    "verify_reads",
]

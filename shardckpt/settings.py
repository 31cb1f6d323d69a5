"""Every environment variable that shardckpt reads: its name, default and meaning."""

from __future__ import annotations

import os

from shardckpt.errors import CheckpointingException

#: Comma-separated entry-point names of plugins to leave out.
DISABLED_PLUGINS = "SHARDCKPT_DISABLED_PLUGINS"
#: Threads that read or write files, a rank; 1 does all file work in the calling thread.
IO_THREADS = "SHARDCKPT_IO_THREADS"
#: 1 checks the digests of what is read (the default), 0 does not.
VERIFY_READS = "SHARDCKPT_VERIFY_READS"


def disabled_plugins() -> frozenset[str]:
    """Names of the plugins that the user switched off."""
    names = os.environ.get(DISABLED_PLUGINS, "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


def io_threads() -> int:
    """Number of file threads a rank; by default the cores, at most 4."""
    return _integer(IO_THREADS, default=min(4, os.cpu_count() or 1), least=1)


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


__all__ = ["DISABLED_PLUGINS", "IO_THREADS", "VERIFY_READS", "disabled_plugins", "io_threads", "verify_reads"]

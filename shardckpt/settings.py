"""Every environment variable that shardckpt reads: its name, default and meaning."""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable

ACCEPT = "SHARDCKPT_ACCEPT"
DIRECT_IO = "SHARDCKPT_DIRECT_IO"
DISABLED_PLUGINS = "SHARDCKPT_DISABLED_PLUGINS"
IO_THREADS = "SHARDCKPT_IO_THREADS"
LEFTOVER_HOURS = "SHARDCKPT_LEFTOVER_HOURS"
PLUGINS = "SHARDCKPT_PLUGINS"
REMOTE_ATTEMPTS = "SHARDCKPT_REMOTE_ATTEMPTS"
REMOTE_PARTS = "SHARDCKPT_REMOTE_PARTS"
REMOTE_PART_MIB = "SHARDCKPT_REMOTE_PART_MIB"
REMOTE_TIMEOUT = "SHARDCKPT_REMOTE_TIMEOUT"
REMOTE_THREADS = "SHARDCKPT_REMOTE_THREADS"
SPACE_CHECK = "SHARDCKPT_SPACE_CHECK"
SPOOL_DIR = "SHARDCKPT_SPOOL_DIR"
STAGED_SAVES = "SHARDCKPT_STAGED_SAVES"
STORES = "SHARDCKPT_STORES"
VERIFY_READS = "SHARDCKPT_VERIFY_READS"

#: How much of two names is equal: plugins may have variables of their own.
_ALMOST = 0.9
#: Of any number: what threads, seconds and hours never need, and what clients cannot count.
_MOST_DIGITS = 9
#: A backend, with or without a version.
_KEY = re.compile(r"[^\s@]+(@[0-9]{1,9})?")


def accept() -> tuple[str, ...] | None:
    """Return the backends, each with or without a version, whose checkpoints this job may read; None for all."""
    if ACCEPT not in os.environ:
        return None
    names = tuple(_names(ACCEPT))
    if wrong := [name for name in names or ("",) if not _KEY.fullmatch(name)]:
        raise CheckpointingException(
            f"{ACCEPT}={os.environ[ACCEPT]!r:.100}: {wrong[0]!r} is no backend: expected names as in "
            "'safetensors,ep@1', separated by commas; unset it to accept all"
        )
    return names


def direct_io() -> bool:
    """Return whether large writes use O_DIRECT where they can."""
    return bool(_integer(DIRECT_IO, default=1, least=0))


def disabled_plugins() -> frozenset[str]:
    """Return the names of the plugins that the user switched off."""
    return frozenset(_names(DISABLED_PLUGINS))


def plugins() -> tuple[str, ...]:
    """Return the modules that the user names as plugins, in their order."""
    return tuple(dict.fromkeys(_names(PLUGINS)))


def find_misspelt() -> dict[str, str]:
    """Return the variables of the environment that are almost one of these, with that one: nothing reads them."""
    unknown = {name for name in os.environ if name.startswith("SHARDCKPT_")} - _VARIABLES.keys()
    if not unknown:
        return {}
    import difflib  # slow to import

    near = {name: difflib.get_close_matches(name, _VARIABLES, 1, _ALMOST) for name in sorted(unknown)}
    return {name: found[0] for name, found in near.items() if found}


def _names(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


#: It does not change, and Linux reads files to count them: 0.1 ms.
_count_cores = functools.cache(os.cpu_count)


def io_threads() -> int:
    """Return the number of file threads per rank; by default one per core, at least 2 and at most 4."""
    return _integer(IO_THREADS, default=max(2, min(4, _count_cores() or 1)), least=1)


def leftover_hours() -> int:
    """Return the hours after which an interrupted save of another host counts as dead."""
    return _integer(LEFTOVER_HOURS, default=24, least=1)


def remote_attempts() -> int:
    """Return how often a request to an object store is tried."""
    return _integer(REMOTE_ATTEMPTS, default=5, least=1)


def remote_parts() -> int:
    """Return how many parts of an object may be on their way to a store at a time."""
    return _integer(REMOTE_PARTS, default=4, least=1)


def remote_part_mib() -> int:
    """Return the size of the parts of an object, in MiB; S3 takes no smaller ones than 5."""
    return _integer(REMOTE_PART_MIB, default=16, least=5)


def remote_timeout() -> int:
    """Return the seconds that one request to a store may take."""
    return _integer(REMOTE_TIMEOUT, default=60, least=1)


def remote_threads() -> int:
    """Return the number of threads per rank that read from an object store."""
    return _integer(REMOTE_THREADS, default=16, least=1)


def space_check() -> bool:
    """Return whether a save is refused if its tensors are more than the file system has free."""
    return bool(_integer(SPACE_CHECK, default=1, least=0))


def spool_directory() -> str | None:
    """Return the directory where files wait for their upload; None for the system's temporary directory."""
    return os.environ.get(SPOOL_DIR) or None


def staged_saves() -> int:
    """Return how many background saves may be staged at a time."""
    return _integer(STAGED_SAVES, default=2, least=1)


def stores_file() -> str | None:
    """Return the file with the options of buckets; None if there is none."""
    return os.environ.get(STORES) or None


def verify_reads() -> bool:
    """Return whether a load checks the digests of the bytes it reads."""
    return bool(_integer(VERIFY_READS, default=1, least=0))


def _integer(name: str, *, default: int, least: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdecimal()) or len(digits) > _MOST_DIGITS or int(digits) < least:
        raise CheckpointingException(
            f"{name}={text!r:.100}: expected a whole number of at least {least}, of {_MOST_DIGITS} digits at most"
        )
    return int(digits)


#: What each is for, in the order of the names, and what reads it.
_VARIABLES: dict[str, tuple[str, Callable[[], object]]] = {
    ACCEPT: (
        (
            "Comma-separated backends, or backend@version, whose checkpoints may be loaded, converted or merged; "
            "all others are refused, whatever accept= says. By default none is"
        ),
        accept,
    ),
    DIRECT_IO: (
        "1 writes large tensors with O_DIRECT where the file system can (the default), 0 does not",
        direct_io,
    ),
    DISABLED_PLUGINS: (
        "Comma-separated entry-point names of plugins that are not loaded",
        disabled_plugins,
    ),
    IO_THREADS: (
        "Threads per rank that read or write files; 1 does all file work in the calling thread",
        io_threads,
    ),
    LEFTOVER_HOURS: (
        (
            "Hours since the last write after which the files of an interrupted save are removed, where nothing "
            "shows whether its process lives: it ran on another host, or in an older release. Those of dead "
            "processes of this host go at once"
        ),
        leftover_hours,
    ),
    PLUGINS: (
        "Comma-separated modules, or module:object, that are plugins without a distribution",
        plugins,
    ),
    REMOTE_ATTEMPTS: (
        "Attempts at a request to an object store, with growing pauses, before it is an error",
        remote_attempts,
    ),
    REMOTE_PARTS: (
        "Parts of an object that are on their way to a store at a time, for each file that a rank writes",
        remote_parts,
    ),
    REMOTE_PART_MIB: (
        "MiB of each part of an object, at least 5; objects of more than 9,000 such parts get larger ones",
        remote_part_mib,
    ),
    REMOTE_THREADS: (
        "Threads per rank that read from an object store: more than cores, because they wait",
        remote_threads,
    ),
    REMOTE_TIMEOUT: (
        (
            "Seconds that one request to a store may take, where the client can be told; and that failed requests of a "
            "manager's save in the background may keep the training waiting"
        ),
        remote_timeout,
    ),
    SPACE_CHECK: (
        (
            "1 refuses a save of more bytes than the file system has free (the default), 0 does not: for those "
            "that report too little, as with thin volumes, or compress. With 0, on_full='prune' makes room once "
            "a write has found none, or a quota refuses the save"
        ),
        space_check,
    ),
    SPOOL_DIR: (
        "Local directory where files for an object store are written before the upload; by default the system's",
        spool_directory,
    ),
    STAGED_SAVES: (
        "Background saves whose copies may be in memory at a time; the next save waits until the first is written",
        staged_saves,
    ),
    STORES: (
        "JSON file with endpoint, region, profile or keys by bucket, where not all are as the environment says",
        stores_file,
    ),
    VERIFY_READS: (
        "1 checks the digests of what is read (the default), 0 does not",
        verify_reads,
    ),
}


class Variable(NamedTuple):
    """A variable of the environment.

    Attributes:
        name: Its name.
        value: What is in force, by default or as it is set.
        text: What it is for; of one that nothing reads, or whose value is wrong, what to do.
        is_wrong: Whether nothing reads it, or its value is wrong.
    """

    name: str
    value: str
    text: str
    is_wrong: bool = False


def check_variables() -> None:
    """Raise the error of a variable that has no value of its kind: at the start, not at the first save."""
    for _, read in _VARIABLES.values():
        read()


def list_variables() -> list[Variable]:
    """Return all variables, by name, and behind them those of the environment that are almost one of these."""
    found = [Variable(name, *_describe(name, text, read)) for name, (text, read) in _VARIABLES.items()]
    wrong = find_misspelt().items()
    return found + [
        Variable(name, os.environ[name], f"nothing reads it: did you mean {near}?", is_wrong=True)
        for name, near in wrong
    ]


def _describe(name: str, text: str, read: Callable[[], object]) -> tuple[str, str, bool]:
    try:
        value = read()
    except CheckpointingException as exc:
        return os.environ[name], str(exc), True
    names = ",".join(sorted(value)) if isinstance(value, (tuple, frozenset)) else value
    return str(int(value) if isinstance(value, bool) else names or "-"), text, False


__all__ = [
    "ACCEPT",
    "DIRECT_IO",
    "DISABLED_PLUGINS",
    "IO_THREADS",
    "LEFTOVER_HOURS",
    "PLUGINS",
    "REMOTE_ATTEMPTS",
    "REMOTE_PARTS",
    "REMOTE_PART_MIB",
    "REMOTE_THREADS",
    "REMOTE_TIMEOUT",
    "SPACE_CHECK",
    "SPOOL_DIR",
    "STAGED_SAVES",
    "STORES",
    "VERIFY_READS",
    "Variable",
    "accept",
    "check_variables",
    "direct_io",
    "disabled_plugins",
    "find_misspelt",
    "io_threads",
    "leftover_hours",
    "list_variables",
    "remote_attempts",
    "remote_part_mib",
    "remote_parts",
    "remote_threads",
    "remote_timeout",
    "space_check",
    "spool_directory",
    "staged_saves",
    "stores_file",
    "verify_reads",
]

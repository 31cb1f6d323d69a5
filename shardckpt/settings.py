"""Every environment variable that shardckpt reads: its name, default and meaning."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from shardckpt.errors import CheckpointingException

_R = TypeVar("_R", bound=Callable[[], object])

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
#: Upper bound of every number: more is never needed, and some clients cannot represent it.
_MOST = 999_999_999
#: They are started before the first file is written: more would keep a save waiting.
_MOST_THREADS = 1024
#: A backend, with or without a version.
_KEY = re.compile(r"[^\s@]+(@[0-9]{1,9})?")


#: The purpose of each variable, and the function that reads it.
_VARIABLES: dict[str, tuple[str, Callable[[], object]]] = {}


def _listed(name: str, text: str) -> Callable[[_R], _R]:
    """Add a variable to those that ``shardckpt config`` lists: a decorator of the function that reads it."""

    def add(read: _R) -> _R:
        _VARIABLES[name] = text, read
        return read

    return add


def _number(name: str, text: str, *, default: int, least: int = 1, most: int = _MOST) -> Callable[[], int]:
    """Add a variable that is a whole number; return the function that reads it."""
    return _listed(name, text)(functools.partial(_integer, name, default, least, most))


def _switch(name: str, text: str) -> Callable[[], bool]:
    """Add a variable that is 1, by default, or 0; return the function that reads it."""
    return _listed(name, text)(lambda: bool(_integer(name, 1, 0, 1)))


def _integer(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    digits = text.lstrip("0") or "0"
    is_number = text.isascii() and text.isdecimal() and len(digits) <= len(str(most))
    if not is_number or not least <= int(digits) <= most:
        raise CheckpointingException(f"{name}={text!r:.100}: expected a whole number from {least} to {most}")
    return int(digits)


def _names(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


@_listed(
    ACCEPT,
    "Comma-separated backends, or backend@version, whose checkpoints may be loaded, converted or merged; all others "
    "are refused, whatever accept= says. By default all are accepted",
)
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


direct_io = _switch(
    DIRECT_IO, "1 writes large tensors with O_DIRECT where the file system can (the default), 0 does not"
)


@_listed(DISABLED_PLUGINS, "Comma-separated entry-point names of plugins that are not loaded")
def disabled_plugins() -> frozenset[str]:
    """Return the names of the plugins that the user switched off."""
    return frozenset(_names(DISABLED_PLUGINS))


#: It does not change, and Linux reads files to count them: 0.1 ms.
_count_cores = functools.cache(os.cpu_count)


@_listed(IO_THREADS, "Threads per rank that read or write files; 1 does all file work in the calling thread")
def io_threads() -> int:
    """Return the number of file threads per rank; by default one per core, at least 2 and at most 4."""
    return _integer(IO_THREADS, max(2, min(4, _count_cores() or 1)), 1, _MOST_THREADS)


leftover_hours = _number(
    LEFTOVER_HOURS,
    "Hours since the last write after which the files of an interrupted save are removed, where nothing shows whether "
    "its process lives: it ran on another host, or in an older release. Those of dead processes of this host go at "
    "once",
    default=24,
)


@_listed(PLUGINS, "Comma-separated modules, or module:object, that are plugins without a distribution")
def plugins() -> tuple[str, ...]:
    """Return the modules that the user names as plugins, in their order."""
    return tuple(dict.fromkeys(_names(PLUGINS)))


remote_attempts = _number(
    REMOTE_ATTEMPTS,
    "Attempts at a request to an object store, with growing pauses, before it is an error",
    default=5,
)
remote_parts = _number(
    REMOTE_PARTS,
    "Parts of an object that are on their way to a store at a time, for each file that a rank writes",
    default=4,
)
remote_part_mib = _number(
    REMOTE_PART_MIB,
    "MiB of each part of an object, at least 5; objects of more than 9,000 such parts get larger ones",
    default=16,
    least=5,  # S3 takes no smaller ones
)
remote_threads = _number(
    REMOTE_THREADS,
    "Threads per rank that read from an object store: more than cores, because they wait",
    default=16,
    most=_MOST_THREADS,
)
remote_timeout = _number(
    REMOTE_TIMEOUT,
    "Seconds that one request to a store may take, where the client can be told; and that failed requests of a "
    "manager's save in the background may keep the training waiting",
    default=60,
)
space_check = _switch(
    SPACE_CHECK,
    "1 refuses a save of more bytes than the file system has free (the default), 0 does not: for those that report "
    "too little, as with thin volumes, or compress. With 0, on_full='prune' makes room once a write has found none, "
    "or a quota refuses the save",
)


@_listed(
    SPOOL_DIR,
    "Local directory where files for an object store are written before the upload; by default the system's",
)
def spool_directory() -> str | None:
    """Return the directory where files wait for their upload; None for the system's temporary directory."""
    return os.environ.get(SPOOL_DIR) or None


staged_saves = _number(
    STAGED_SAVES,
    "Background saves whose copies may be in memory at a time; the next save waits until the first is written",
    default=2,
)


@_listed(
    STORES,
    "JSON file with endpoint, region, profile or keys by bucket, where not all are as the environment says",
)
def stores_file() -> str | None:
    """Return the file with the options of buckets; None if there is none."""
    return os.environ.get(STORES) or None


verify_reads = _switch(VERIFY_READS, "1 checks the digests of the bytes that are read (the default), 0 does not")


def find_misspelt() -> dict[str, str]:
    """Return the variables of the environment that are almost one of these, with that one: nothing reads them."""
    unknown = {name for name in os.environ if name.startswith("SHARDCKPT_")} - _VARIABLES.keys()
    if not unknown:
        return {}
    import difflib  # slow to import

    near = {name: difflib.get_close_matches(name, _VARIABLES, 1, _ALMOST) for name in sorted(unknown)}
    return {name: found[0] for name, found in near.items() if found}


class Variable(NamedTuple):
    """A variable of the environment.

    Attributes:
        name: Its name.
        value: What is in force, by default or as it is set.
        text: Its purpose; of one that nothing reads, or whose value is wrong, what to do.
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

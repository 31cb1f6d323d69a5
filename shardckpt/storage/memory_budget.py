"""Split a memory budget into reading and writing: a few buffers, whose number and size follow from it.

The budget is of one rank, and counts the memory of a call besides the tensors themselves. Nothing is counted while it
runs: the threads, and the bytes that each may hold, are chosen so that all of them together stay below it. So no thread
waits for memory of another, and no order of reads or writes can exceed it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shardckpt import settings
from shardckpt.errors import CheckpointingException, ConfigurationError, format_many
from shardckpt.storage.digest import MAX_SEGMENT
from shardckpt.storage.store_abilities import LimitsUploads

_MIB = 1 << 20
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
#: Bytes from which on a number is no size: torch and the system count in 64 bits.
_LIMIT = 1 << 63
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

#: The least budget of a load, in bytes, and of a save to a directory.
LEAST_READING = LEAST_WRITING = 8 * _MIB
#: Bytes of one request to a store where no budget says less.
REQUEST_BYTES = 4 * MAX_SEGMENT
#: Bytes that one thread holds that reads files: two pieces, a block of small items, and a spare block.
_FILE_THREAD = 8 * _MIB
#: Bytes that one thread holds that writes files: a block that is being written, one that waits, and pieces.
_WRITE_THREAD = 4 * _MIB
#: How often the bytes of a request are in memory: clients join the parts of a response, and pieces go through a buffer.
_COPIES = 3
#: Bytes of the blocks of a thread that reads from a store.
_BLOCKS = 2 * _MIB
#: A store's round trips need so many requests at a time; above it, larger requests are better than more of them.
_ENOUGH_REQUESTS = 8
#: Stores take no smaller parts but the last.
_LEAST_PART = 5 * _MIB
#: Beside the parts on their way: one that waits for its turn, and one that is being filled.
_MORE_PARTS = 2
#: S3 takes 10,000 parts an object.
_MOST_PARTS = 9_000


class ReadLimits(NamedTuple):
    """How many threads read a checkpoint at a time, and how many bytes one request to a store has at most."""

    threads: int
    request_bytes: int


class UploadLimits(NamedTuple):
    """How many parts of an object are on their way to a store at a time, and how many bytes a part has."""

    parts: int
    part_bytes: int

    @property
    def nbytes(self) -> int:
        """The most bytes of an object that are in memory."""
        return (self.parts + _MORE_PARTS) * self.part_bytes


def parse_size(size: int | str, argument: str = "max_shard_size") -> int:
    """Parse a size such as ``5GB`` (10^9) or ``5GiB`` (2^30).

    Args:
        size: The text, or a number of bytes.
        argument: The name of the caller's argument, for the error.

    Returns:
        The size in bytes.

    Raises:
        ConfigurationError: it is not a size, not above 0, or 2^63 or more.
    """
    found = _SIZE.fullmatch(str(size))
    factor = _UNITS.get(found[2].upper()) if found else None
    nbytes = float(found[1]) * factor if found and factor else 0.0  # inf for hundreds of digits
    if not 1 <= nbytes < _LIMIT:
        raise ConfigurationError(
            f"{argument}={size!r:.100}: expected a number of bytes above 0 and below 2^63, or text "
            "such as '5GB', '500MB' or '2GiB'"
        )
    return int(nbytes)


def parse_memory_budget(budget: int | str | None) -> int | None:
    """Return a caller's ``memory_budget`` in bytes; None if there is none."""
    return None if budget is None else parse_size(budget, "memory_budget")


def check_memory_budget(budget: int | None, least: int, action: str, advice: str = "") -> None:
    """Refuse a budget of less than ``least`` bytes; see :func:`explain_small_budget`."""
    if text := explain_small_budget(budget, least, action, advice):
        raise CheckpointingException(text)


def explain_small_budget(budget: int | None, least: int, action: str, advice: str = "") -> str:
    """Return the error of a budget of less than ``least`` bytes, ``""`` if it has these.

    The text says how many bytes the action needs (``"to load takes"``), and then the advice.
    """
    if budget is None or budget >= least:
        return ""
    return f"{show_budget(budget)}: {action} at least {show_mib(least)}{advice}"


def show_budget(budget: int) -> str:
    """Return a budget that is too small, for the beginning of an error."""
    return f"memory_budget of {format_many(budget, 'byte')} is too small"


def show_mib(nbytes: int) -> str:
    """Return bytes as MiB, rounded up, as ``memory_budget`` takes them."""
    return f"{-(-nbytes // _MIB)}MiB"


def plan_reading(budget: int | None, *, by_requests: bool) -> ReadLimits:
    """Return how to read within a budget in bytes, from a store (``by_requests``) or a directory; None is no budget."""
    if not by_requests:
        threads = settings.io_threads()
        if budget is not None:
            threads = max(1, min(threads, budget // _FILE_THREAD))
        return ReadLimits(threads, REQUEST_BYTES)
    threads = settings.remote_threads()
    if budget is None:
        return ReadLimits(threads, REQUEST_BYTES)
    nbytes, found = REQUEST_BYTES, 0
    while True:
        found = budget // (_COPIES * nbytes + _BLOCKS)
        if found >= min(threads, _ENOUGH_REQUESTS) or nbytes == _MIB:
            return ReadLimits(max(1, min(threads, found)), nbytes)
        nbytes //= 2


def plan_write_threads(budget: int | None) -> int:
    """Return how many threads write files within a budget; None for none."""
    threads = settings.io_threads()
    return threads if budget is None else max(1, min(threads, budget // _WRITE_THREAD))


def plan_upload(room: int | None, nbytes: int = 0) -> UploadLimits:
    """Return in which parts to send an object of ``nbytes`` bytes to a store, which takes no more than 10,000 parts.

    ``room`` is how many bytes of parts may be in memory at a time, None for any number; if it is less than the smallest
    parts need, these are returned.
    """
    least = max(_LEAST_PART, -(-nbytes // _MOST_PARTS // _MIB) * _MIB)  # of MiB: some stores take no odd sizes
    parts, part_bytes = settings.remote_parts(), max(least, settings.remote_part_mib() * _MIB)
    if room is None:
        return UploadLimits(parts, part_bytes)
    parts = fit_parts(room, least)
    fitting = room // (parts + _MORE_PARTS) // _MIB * _MIB
    return UploadLimits(parts, max(least, min(part_bytes, fitting)))


def fit_parts(room: int | None, part_bytes: int) -> int:
    """Return how many parts of an object may be on their way, at least one."""
    parts = settings.remote_parts()
    return parts if room is None else max(1, min(parts, room // part_bytes - _MORE_PARTS))


def find_upload_room(budget: int | None) -> int | None:
    """Return the bytes of an object's parts that a save's budget has room for; None for no budget."""
    return None if budget is None else budget - LEAST_WRITING


def find_least_upload(nbytes: int = 0) -> int:
    """Return the least budget of a save to a store whose largest file on a rank has so many bytes."""
    return plan_upload(0, nbytes).nbytes + LEAST_WRITING


def limit_uploads(folder: object, budget: int | None) -> None:
    """Make the uploads of a folder that a save has opened stay within its budget, where the store's client can."""
    room = find_upload_room(budget)
    if room is not None and isinstance(folder, LimitsUploads):
        folder.limit_uploads(room)

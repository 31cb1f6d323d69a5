"""The limit of a process on open files: where it is reached, readers close files that they only keep open."""

from __future__ import annotations

import errno
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

#: No more files for the process, or for the system.
_LIMITS = {errno.EMFILE, errno.ENFILE}


class KeepsFilesOpen(Protocol):
    """An object that keeps files open, to read them again soon."""

    def close_unused(self) -> bool:
        """Close the files that nobody uses, without waiting for a lock; return whether there were any."""


#: Those of the process. Without a lock, which a thread might hold while another one forks: each call is one step.
_keepers: set[weakref.ref[KeepsFilesOpen]] = set()


def note_keeper(keeper: KeepsFilesOpen) -> None:
    """Have an object close files where the limit is reached, as long as it lives."""
    _keepers.add(weakref.ref(keeper, _keepers.discard))


def open_within_limit(open_file: Callable[[], _T]) -> _T:
    """Return the result of a call that opens a file; where the limit is reached, close others first, if there are any.

    Raises:
        OSError: as the call does.
    """
    while True:
        try:
            return open_file()
        except OSError as exc:  # noqa: PERF203 - once, as a rule
            if exc.errno not in _LIMITS or not _close_unused():
                raise


def _close_unused() -> bool:
    keepers = [found for each in list(_keepers) if (found := each()) is not None]
    return sum(keeper.close_unused() for keeper in keepers) > 0

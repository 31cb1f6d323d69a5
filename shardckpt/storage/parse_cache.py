"""The parsed content of small files, kept for the next load of this process that reads the same bytes."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_T = TypeVar("_T")

#: Values that are kept. A process that reads slices reads many of few checkpoints.
_KEPT = 4
#: Bytes. Larger files are parsed each time: their parsed values would take memory from the training.
_MOST_BYTES = 256 << 10


class ParseCache(Generic[_T]):
    """Parsed values by the bytes that they were parsed from. For several threads.

    The caller reads the bytes, and checks their digests, each time: only to parse equal bytes again is saved. All
    callers share a value, and do not change it; it must not refer to a reader, whose directory would stay open.

    Args:
        most_bytes: Larger inputs are parsed each time.
        kept: Values that are kept.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES, kept: int = _KEPT) -> None:
        self._most_bytes = most_bytes
        self._kept = kept
        #: The most recently used one last.
        self._found: dict[Hashable, _T] = {}
        # another process has no use for them, and may live long
        os.register_at_fork(after_in_child=self._found.clear)

    def get(
        self,
        data: bytes | bytearray | memoryview,
        others: Hashable,
        parse: Callable[[], _T],
        may_keep: Callable[[_T], bool] = lambda _: True,
    ) -> _T:
        """Return ``parse()``, or its earlier result for equal arguments.

        Args:
            data: All bytes that it parses.
            others: All else that its result, or its error, depends on.
            parse: Makes the value. If it raises, nothing is kept.
            may_keep: Returns whether a value may be kept.
        """
        if len(data) > self._most_bytes:
            return parse()
        key = (others, bytes(data))
        # no lock: each step is one for all threads, and where two meet one of them parses once more
        found: Any = self._found.pop(key, self)
        value: _T = parse() if found is self else found
        if found is self and not may_keep(value):
            return value
        self._found[key] = value
        while len(self._found) > self._kept:
            with suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
                del self._found[next(iter(self._found))]
        return value

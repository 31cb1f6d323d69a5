"""What was dealt out last time, kept as long as no rank has anything else to deal."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.comm import Comm

_T = TypeVar("_T")


class DealCache(Generic[_T]):
    """Remembers a deal, and deals anew on all ranks as soon as one of them has other shards than last time.

    Args:
        enabled: Whether to remember at all; if not, every time is the first.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._digest = b""
        self._deals: list[_T] = []

    def get(self, share: object, group: Comm, deal: Callable[[], _T]) -> _T:
        """The deal for the shares of all ranks; one bit of each rank decides whether the last one still holds.

        Args:
            share: All that this rank tells the others for the deal, as plain data whose text says everything of it.
            group: The ranks that deal.
            deal: Gathers the shares of all ranks, and deals.
        """
        digest = hashlib.sha256(repr((group.members, group.rank, share)).encode()).digest() if self._enabled else b""
        if group.all_true(bool(self._deals) and digest == self._digest):
            return self._deals[0]
        self._deals = []  # a deal that fails on one rank leaves that rank with none, so that all deal again
        dealt = deal()
        if self._enabled:
            self._digest, self._deals = digest, [dealt]
        return dealt


__all__ = ["DealCache"]

"""What ranks have planned together last time, kept as long as no rank has anything else to plan."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.distributed import Comm

_T = TypeVar("_T")


class PlanCache(Generic[_T]):
    """Remembers a plan, and plans anew on all ranks as soon as one of them has other shards than last time.

    Args:
        enabled: Whether to remember at all; if not, every time is the first.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._digest = b""
        self._plans: list[_T] = []
        #: How many plans were made, and how many used again.
        self.made = 0
        self.reused = 0

    def get(self, share: object, group: Comm, plan: Callable[[], _T]) -> _T:
        """The plan for the shares of all ranks; one bit of each rank decides whether the last one still holds.

        Args:
            share: All that this rank tells the others for the plan, as plain data whose text says everything of it.
            group: The ranks that plan.
            plan: Gathers the shares of all ranks, and plans.
        """
        if not self._enabled:
            self.made += 1
            return plan()
        digest = hashlib.sha256(repr((group.members, group.rank, share)).encode()).digest()
        if group.all_true(bool(self._plans) and digest == self._digest):
            self.reused += 1
            return self._plans[0]
        self._plans = []  # a plan that fails on one rank leaves that rank with none, so that all plan again
        found = plan()
        self.made += 1
        self._digest, self._plans = digest, [found]
        return found


__all__ = ["PlanCache"]

"""A clock for tests of ages: it stands still until the test moves it."""

from __future__ import annotations

import time


class Clock:
    """What ``time.time()`` returns in this process.

    Attributes:
        now: Seconds since the epoch. At first those of the system, which files have that the test makes.
    """

    def __init__(self) -> None:
        self.now = time.time()

    def advance(self, *, hours: float) -> None:
        """Let time pass."""
        self.now += 3600 * hours

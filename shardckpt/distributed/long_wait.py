"""Report a rank's long wait in a collective, once, with its public call: most often another rank has not called it.

Only this rank logs it. Nothing is written to the store of the process group, which a healthy group never touches; so a
rank does not learn which of several others it waits for.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType

logger = logging.getLogger(__name__)

#: Seconds after which a rank says that it waits.
NOTICE_AFTER = 10.0
#: The most ranks that a report names one by one.
_NAMED_RANKS = 8
#: Packages of ours that call the library as a program does.
_PROGRAMS = ("shardckpt.testing.", "shardckpt.demo.")
#: Seconds after which a public call, or a phase, is reported the next time, by its name. They double at each report:
#: where ranks write unequal parts, one waits at every save, and only a much longer wait than before is news.
_next_notice: dict[str, float] = {}
#: The waits of this process that have not ended, of all threads.
_waits: list[LongWait] = []


class LongWait:
    """A wait of this rank in a collective, from its start to :meth:`end`.

    Args:
        started: When it began, in seconds of the clock by which it is reported.
        rank: This rank, by its number in the whole job.
        members: The ranks of the group, by their numbers in the whole job.
        phase: The work of this rank, as errors name it; "" if no phase has begun.
    """

    def __init__(self, started: float, rank: int, members: Sequence[int], phase: str) -> None:
        self._started = started
        self._rank = rank
        self._members = members
        self._phase = phase
        self._is_reported = False
        self.thread = threading.get_ident()
        _waits.append(self)

    def end(self) -> None:
        """End the wait, as the thread that began it."""
        _waits.remove(self)

    def report_once(self, now: float) -> None:
        """Log a warning if the wait has become long, once; a thread that waits calls it now and then.

        Without a logging configuration Python prints warnings on stderr. No error of a logging handler is raised: it
        must not fail a collective, least of all on one rank.
        """
        with suppress(Exception):
            self._report_once(now, sys._getframe(1))  # noqa: SLF001 - CPython's way to walk the stack

    def _report_once(self, now: float, frame: FrameType) -> None:
        waited = now - self._started
        if self._is_reported or waited < NOTICE_AFTER:
            return
        call, caller = _find_public_call(frame)
        if not is_news(call, waited, NOTICE_AFTER):
            return
        self._is_reported = True
        others = [str(other) for other in self._members if other != self._rank]
        if len(others) == 1:
            missing = f"rank {others[0]}, which has not called it, or is still busy in it"
        else:
            named = f"ranks {', '.join(others)}" if len(others) <= _NAMED_RANKS else f"the other {len(others)} ranks"
            missing = f"one or more of {named}: they have not called it, or are still busy in it"
        logger.warning(
            "shardckpt: rank %d has waited for %.0f s in %s, called at %s%s, for %s. It is collective: every rank "
            "must call it. py-spy dump shows what a rank is doing",
            self._rank,
            waited,
            call,
            caller,
            f" ({self._phase})" if self._phase else "",
            missing,
        )


def is_waiting(thread: int) -> bool:
    """Return whether a thread waits for other ranks, which :class:`LongWait` reports."""
    return any(wait.thread == thread for wait in [*_waits])


def is_news(name: str, seconds: float, first: float) -> bool:
    """Return whether a call or phase has taken long enough to be reported; if so, the next is due after twice as long.

    Args:
        name: Its name.
        seconds: Its duration so far.
        first: Seconds after which it is reported for the first time.
    """
    after = _next_notice.get(name, first)
    if seconds < after:
        return False
    _next_notice[name] = 2 * after
    return True


def _find_public_call(frame: FrameType | None) -> tuple[str, str]:
    """Return the function of shardckpt that the program has called, as ``CheckpointManager.steps()``, and from where.

    It is the outermost frame of shardckpt on the stack: strategies of others, and the standard library, lie between it
    and the collective.
    """
    call, caller = "a collective", "an unknown line"
    while frame is not None:
        name, module = _get_name(frame.f_code), frame.f_globals.get("__name__", "")
        # wrappers and functions within them are not the call that the program made
        if module.startswith("shardckpt") and not module.startswith(_PROGRAMS) and "<" not in name:
            call, outer = f"{name}()", frame.f_back
            while outer is not None and outer.f_globals.get("__name__") in ("contextlib", "functools"):
                outer = outer.f_back  # of a `with` statement
            if outer is not None:
                caller = f"{outer.f_code.co_filename}:{outer.f_lineno}"
        frame = frame.f_back
    return call, caller


def _get_name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 knows no classes here

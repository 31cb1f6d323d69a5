"""The garbage collector: paused while anyone asks for it, and never for longer."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING

from shardckpt.engine.gc_pause import pause_gc
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable


def _in_child(function: Callable[[], bool]) -> int:
    """What a forked child's exit status is: 0 where the function is true."""
    child = os.fork()
    if not child:
        os._exit(0 if function() else 1)
    return os.waitpid(child, 0)[1]


@table("ran", [True, False])
def test_forked_meanwhile(ran: bool) -> None:
    """A child that is forked while another thread pauses the collector has it as it was before, and can pause it."""
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with pause_gc():
            held.set()
            end.wait(60)

    def as_it_was() -> bool:
        before = gc.isenabled()
        with pause_gc():
            between = gc.isenabled()
        return before == ran and not between and gc.isenabled() == ran

    if not ran:
        gc.disable()
    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(60)
        assert _in_child(as_it_was) == 0
    finally:
        end.set()
        holder.join()
        assert gc.isenabled() == ran
        gc.enable()


def test_forked_in_the_middle() -> None:
    """A child that is forked in a pause, and leaves it as its parent does, can pause the collector again."""
    with pause_gc():
        child = os.fork()
    if not child:
        with pause_gc():
            held = not gc.isenabled()
        os._exit(0 if held and gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()

"""The garbage collector: paused while anyone asks for it, and never for longer."""

from __future__ import annotations

import gc

from shardckpt.engine.gc_pause import pause_gc


def test_nested_holds() -> None:
    """The collector runs again when the last pause has ended."""
    assert gc.isenabled()
    with pause_gc():
        with pause_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()

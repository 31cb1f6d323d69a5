"""The child's side of a WorkerProcess: runs the calls that come through its pipe."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shardckpt.background.process import EVENT_NUMBER, NUMBER_BYTES, Outcome
from shardckpt.distributed.error_report import ErrorReport
from shardckpt.distributed.pickling import pickle_value, unpickle_parts
from shardckpt.errors import CheckpointingException
from shardckpt.plugins.hookspecs import hookimpl
from shardckpt.plugins.manager import get_plugin_manager

if TYPE_CHECKING:
    from shardckpt.plugins.hookspecs import Event

#: Seconds between two checks of an idle process whether its parent is alive.
_ROUND = 1.0


def main(pipe: int, parent: int) -> None:
    """Run the calls that come through the inherited socket ``pipe``, while the process ``parent`` is alive."""
    connection = Connection(pipe)
    lock = threading.Lock()  # threads that write report their progress
    get_plugin_manager().observe_by(_Reporter(connection, lock), "progress of the worker process")
    with suppress(EOFError, OSError):  # the parent has ended
        while start := _receive_start(connection, parent):
            number, parts = start[:NUMBER_BYTES], int.from_bytes(start[NUMBER_BYTES:], "little")
            outcome = _run([connection.recv_bytes() for _ in range(parts)])
            with lock:
                connection.send_bytes(number + outcome)


class _Reporter:
    """Sends the progress of this process's saves to the parent, whose plugins observe it: a bar, or telemetry."""

    #: So that a save reports it, if the parent has asked for it.
    wants_progress = True

    def __init__(self, connection: Connection, lock: threading.Lock) -> None:
        self._connection, self._lock = connection, lock

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        if event.state != "progress":  # all other events of a save are the parent's own
            return
        with self._lock, suppress(OSError):  # a parent that has ended is noticed by the main thread
            self._connection.send_bytes(EVENT_NUMBER + pickle_value(event))


def _receive_start(connection: Connection, parent: int) -> bytes:
    """Wait for the next call, and return the message that comes before it; return b"" if there are no more."""
    while not connection.poll(_ROUND):
        if os.getppid() != parent:  # there may be no EOF: forks of the parent can hold its end of the pipe open
            return b""
    return connection.recv_bytes()


def _run(call: list[bytes]) -> bytes:
    """Run a pickled call, and return the pickle of its outcome."""
    try:
        function, args, kwargs = _unpickle(call)
        return pickle_value(Outcome(None if function is None else function(*args, **kwargs)))
    except Exception as exc:  # noqa: BLE001 - the training process raises it
        return pickle_value(Outcome(None, ErrorReport.of(exc, f"in process {os.getpid()}", with_traceback=True)))


def _unpickle(call: list[bytes]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    try:
        return unpickle_parts(call)  # type: ignore[no-any-return]
    except Exception as exc:
        raise CheckpointingException(
            f"a request cannot be unpickled here ({type(exc).__name__}: {exc}): define its classes and functions in "
            "modules that can be imported, not in __main__; or use a thread: AsyncCallsQueue(persistent=False) or "
            "CheckpointConfig(async_mode='async')"
        ) from exc

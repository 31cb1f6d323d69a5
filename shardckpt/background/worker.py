"""The child's side of a WorkerProcess: runs the calls that come through its pipe."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from shardckpt.background.process import NUMBER_BYTES, Outcome
from shardckpt.distributed import ErrorReport, unpickled
from shardckpt.errors import CheckpointingException

#: Seconds between two checks of an idle process whether its parent is alive.
_ROUND = 1.0


def main(pipe: int, parent: int) -> None:
    """Run the calls that come through the inherited socket ``pipe``, while the process ``parent`` is alive."""
    connection = Connection(pipe)
    with suppress(EOFError, OSError):  # the parent has ended
        while data := _receive(connection, parent):
            connection.send_bytes(data[:NUMBER_BYTES] + _pickle(_run(data[NUMBER_BYTES:])))


def _receive(connection: Connection, parent: int) -> bytes:
    """Wait for the next call; return b"" if there are no more."""
    while not connection.poll(_ROUND):
        if os.getppid() != parent:  # there may be no EOF: forks of the parent can hold its end of the pipe open
            return b""
    return connection.recv_bytes()


def _run(call: bytes) -> Outcome:
    try:
        function, args, kwargs = _unpickle(call)
        return Outcome(None if function is None else function(*args, **kwargs))
    except Exception as exc:  # noqa: BLE001 - the training process raises it
        return _report(exc)


def _unpickle(call: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    try:
        return unpickled(call)  # type: ignore[no-any-return]
    except Exception as exc:
        raise CheckpointingException(
            f"a request cannot be unpickled here ({type(exc).__name__}: {exc}): what it names must be in modules that "
            "can be imported, not in __main__; or use AsyncCallsQueue(persistent=False), which works in a thread"
        ) from exc


def _report(error: BaseException) -> Outcome:
    return Outcome(None, ErrorReport.of(error, f"in process {os.getpid()}", with_traceback=True))


def _pickle(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as exc:  # noqa: BLE001 - pickling may raise anything
        return pickle.dumps(_report(exc))


__all__ = ["main"]

"""The child's side of a WorkerProcess: runs the calls that come through its pipe."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from shardckpt.background.process import NUMBER_BYTES, Outcome
from shardckpt.distributed import ErrorReport, pickle_value, unpickle_trusted
from shardckpt.errors import CheckpointingException

#: Seconds between two checks of an idle process whether its parent is alive.
_ROUND = 1.0


def main(pipe: int, parent: int) -> None:
    """Run the calls that come through the inherited socket ``pipe``, while the process ``parent`` is alive."""
    connection = Connection(pipe)
    with suppress(EOFError, OSError):  # the parent has ended
        while data := _receive(connection, parent):
            connection.send_bytes(data[:NUMBER_BYTES] + _run(data[NUMBER_BYTES:]))


def _receive(connection: Connection, parent: int) -> bytes:
    """Wait for the next call; return b"" if there are no more."""
    while not connection.poll(_ROUND):
        if os.getppid() != parent:  # there may be no EOF: forks of the parent can hold its end of the pipe open
            return b""
    return connection.recv_bytes()


def _run(call: bytes) -> bytes:
    """Run a pickled call, and return the pickle of its outcome."""
    try:
        function, args, kwargs = _unpickle(call)
        return pickle_value(Outcome(None if function is None else function(*args, **kwargs)))
    except Exception as exc:  # noqa: BLE001 - the training process raises it
        return pickle_value(Outcome(None, ErrorReport.of(exc, f"in process {os.getpid()}", with_traceback=True)))


def _unpickle(call: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    try:
        return unpickle_trusted(call)  # type: ignore[no-any-return]
    except Exception as exc:
        raise CheckpointingException(
            f"a request cannot be unpickled here ({type(exc).__name__}: {exc}): what it names must be in modules that "
            "can be imported, not in __main__; or use a thread: AsyncCallsQueue(persistent=False) or "
            "CheckpointConfig(async_mode='async')"
        ) from exc

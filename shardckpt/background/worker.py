"""The other side of a WorkerProcess: takes calls from its pipe until there are no more."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from shardckpt.background.process import NUMBER_BYTES, Outcome
from shardckpt.distributed import ErrorReport, unpickled
from shardckpt.errors import CheckpointingException

#: Seconds after which a process that has nothing to do sees whether it still has a parent.
_ROUND = 1.0


def main(pipe: int, parent: int) -> None:
    """Serve the calls that come through the inherited socket ``pipe``, as long as the process ``parent`` lives."""
    connection = Connection(pipe)
    with suppress(EOFError, OSError):  # the parent is gone
        while data := _received(connection, parent):
            connection.send_bytes(data[:NUMBER_BYTES] + _pickled(_outcome(data[NUMBER_BYTES:])))


def _received(connection: Connection, parent: int) -> bytes:
    """The next call; b"" if there are no more."""
    while not connection.poll(_ROUND):
        if os.getppid() != parent:  # its forks may hold its end of the pipe open
            return b""
    return connection.recv_bytes()


def _outcome(call: bytes) -> Outcome:
    try:
        function, args, kwargs = _unpickled(call)
        return Outcome(None if function is None else function(*args, **kwargs))
    except Exception as exc:  # noqa: BLE001 - whatever it is, the training process must hear of it
        return _failed(exc)


def _unpickled(call: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    try:
        return unpickled(call)  # type: ignore[no-any-return]
    except Exception as exc:
        raise CheckpointingException(
            f"a request cannot be unpickled here ({type(exc).__name__}: {exc}): what it names must be in modules that "
            "can be imported, not in __main__; or use AsyncCallsQueue(persistent=False), which works in a thread"
        ) from exc


def _failed(error: BaseException) -> Outcome:
    return Outcome(None, ErrorReport.of(error, f"in process {os.getpid()}", with_traceback=True))


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as exc:  # noqa: BLE001 - any class may refuse in any way
        return pickle.dumps(_failed(exc))


__all__ = ["main"]

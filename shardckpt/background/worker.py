"""The other side of a WorkerProcess: takes calls from its pipe until there are no more."""

from __future__ import annotations

import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

from shardckpt.background.process import NUMBER_BYTES, Outcome
from shardckpt.comm import unpickled
from shardckpt.errors import CheckpointingException


def main(pipe: int) -> None:
    """Serve the calls that come through the inherited socket ``pipe``.

    The training process decides when this one ends: Ctrl-C in its terminal is for it, and its end is ours.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(pipe)
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        if not data:
            return
        _send(connection, _outcome(data))


def _outcome(data: bytes) -> Outcome:
    number = int.from_bytes(data[:NUMBER_BYTES], "little")
    try:
        function, args, kwargs = unpickled(data[NUMBER_BYTES:])
        return Outcome(number, None if function is None else function(*args, **kwargs))
    except Exception as exc:  # noqa: BLE001 - whatever it is, the training process must hear of it
        return _failed(number, exc)


def _failed(number: int, error: BaseException) -> Outcome:
    ours = isinstance(error, CheckpointingException)
    return Outcome(number, None, type(error).__name__, str(error) if ours else f"{type(error).__name__}: {error}")


def _send(connection: Any, outcome: Outcome) -> None:
    try:
        data = pickle.dumps(outcome)
    except Exception as exc:  # noqa: BLE001 - any class may refuse in any way
        data = pickle.dumps(_failed(outcome.number, exc))
    connection.send_bytes(data)


__all__ = ["main"]

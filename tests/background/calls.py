"""Functions for worker processes, which find them by name."""

from __future__ import annotations

import os
import time
from typing import Any

from shardckpt.errors import CheckpointingException, StorageError


def wait(seconds: float, result: Any = None) -> Any:
    """A slow writer."""
    time.sleep(seconds)
    return result


def wait_for(path: str) -> None:
    """A writer that is busy until a file is there."""
    while not os.path.exists(path):  # noqa: PTH110 - as often as it can
        time.sleep(0.01)


def length(data: bytes, _: Any = None) -> int:
    """A writer with much to write."""
    return len(data)


def fail_without_a_word() -> None:
    """An error that says nothing."""
    raise CheckpointingException


def fail_with_a_cause() -> None:
    """An error of the family, from one that is not."""
    try:
        raise OSError("disk on fire")
    except OSError as exc:
        raise StorageError("__0_0.distcp cannot be written") from exc


class BadCodeError(StorageError):
    """A plugin's error, whose constructor takes other arguments."""

    def __init__(self, code: int, *, path: str) -> None:
        super().__init__(f"{path}: code {code}")
        self.code = code


def fail_like_a_plugin() -> None:
    """An error that is the plugin's own."""
    raise BadCodeError(7, path="f")


class ForeignError(Exception):
    """A plugin's error from outside the family."""


def fail_like_a_foreign_plugin() -> None:
    """An error of a class from outside the family."""
    raise ForeignError("odd")


def fail_like_nobody_else() -> None:
    """An error whose class is only in the process that raises it."""

    class LocalError(StorageError):
        """Only here."""

    raise LocalError("odd")


def give_what_nobody_can_take() -> _OnlyHere:
    """A result that only the process that made it can rebuild."""
    return _OnlyHere(os.getpid())


class _OnlyHere:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.pid,)


def _rebuilt(pid: int) -> _OnlyHere:
    if pid != os.getpid():
        raise TypeError("not here")
    return _OnlyHere(pid)

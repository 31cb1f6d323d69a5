"""Pickles between the processes of one job. Nothing that was stored is read with this module."""

from __future__ import annotations

import pickle
from pickle import PicklingError
from typing import Any

__all__ = ["PicklingError", "can_be_pickled", "pickle_value", "try_pickle", "unpickle_trusted"]


def pickle_value(value: Any) -> bytes:
    """Return the value's pickle, to send to another process. It raises whatever the value's class raises."""
    return pickle.dumps(value)


def try_pickle(value: Any) -> bytes | None:
    """Return the value's pickle, to send to another process, or None if pickle does not take it."""
    try:
        return pickle_value(value)
    except Exception:  # noqa: BLE001 - any class may refuse with any error
        return None


def can_be_pickled(value: Any) -> bool:
    """Return whether pickle takes the value."""
    return try_pickle(value) is not None


def unpickle_trusted(data: bytes | memoryview) -> Any:
    """Return the value that another process of this job pickled; never call it on stored bytes, which may run code."""
    return pickle.loads(data)  # noqa: S301 - from a rank of this job, which runs the same program

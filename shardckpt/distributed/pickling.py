"""Pickles between processes of one job: never of anything that was stored."""

from __future__ import annotations

import pickle
from typing import Any


def pickled(value: Any) -> bytes | None:
    """The value on its way to another rank, or None where pickle does not take it."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001 - any class may refuse in any way
        return None


def can_be_pickled(value: Any) -> bool:
    """Whether pickle takes the value: it can go to another rank, or into a pickled object."""
    return pickled(value) is not None


def unpickled(data: bytes | memoryview) -> Any:
    """What another process of this job has pickled: never anything that was stored."""
    return pickle.loads(data)  # noqa: S301 - from a rank of this job, which runs the same program


__all__ = ["can_be_pickled", "pickled", "unpickled"]

"""Pickles between the processes of one job. Nothing that was stored is read with this module."""

from __future__ import annotations

import io
import pickle
from pickle import PickleBuffer, PicklingError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "PicklingError",
    "SharedPickle",
    "can_be_pickled",
    "pickle_parts",
    "pickle_to_compare",
    "pickle_value",
    "try_pickle",
    "unpickle_parts",
    "unpickle_trusted",
]

#: The first protocol of pickle that can leave buffers out of a pickle.
_WITH_BUFFERS = 5


class SharedPickle:
    """The pickle of a value that is sent many times, as a part of other values: made once.

    :func:`pickle_parts` does not copy it: to touch 4 MB of fresh memory takes 5 ms.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def unpickle(self) -> Any:
        """Return the value."""
        return unpickle_trusted(self._data)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return SharedPickle, (PickleBuffer(self._data) if protocol >= _WITH_BUFFERS else self._data,)


def pickle_parts(value: Any) -> list[bytes | memoryview]:
    """Return the value's pickle, and then that of each :class:`SharedPickle` in it, to send to another process."""
    buffers: list[PickleBuffer] = []
    data = pickle.dumps(value, protocol=_WITH_BUFFERS, buffer_callback=buffers.append)
    return [data, *(buffer.raw() for buffer in buffers)]


def unpickle_parts(parts: Sequence[bytes]) -> Any:
    """Return the value of :func:`pickle_parts` of another process of this job; as :func:`unpickle_trusted`."""
    data, *buffers = parts
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - from a process of this job


def pickle_value(value: Any) -> bytes:
    """Return the value's pickle, to send to another process. It raises whatever the value's class raises."""
    return pickle.dumps(value)


def pickle_to_compare(value: Any, replace: Callable[[Any], tuple[Any, ...] | None]) -> bytes:
    """Return a pickle that is compared, and never read.

    ``replace`` returns the tuple to pickle for an object inside; None for the object itself.
    """

    class Replacing(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            replaced = replace(obj)
            return NotImplemented if replaced is None else (tuple, (replaced,))

    file = io.BytesIO()
    Replacing(file).dump(value)
    return file.getvalue()


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

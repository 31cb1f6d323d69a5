"""Changes of a whole process that ranks make, which may be threads of it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import Lock
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

P = ParamSpec("P")


def shared_by_ranks(make: Callable[P, AbstractContextManager[object]]) -> Callable[P, AbstractContextManager[None]]:
    """Let a context manager, which all ranks enter alike, begin with the first rank and end with the last."""
    lock, inside, stack = Lock(), 0, ExitStack()

    @contextmanager
    @wraps(make)
    def enter(*args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                stack.enter_context(make(*args, **kwargs))
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    stack.close()

    return enter


__all__ = ["shared_by_ranks"]

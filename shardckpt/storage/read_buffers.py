"""Memory that bytes pass through on their way elsewhere: taken from the system once, and used again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardckpt.tensors import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


class ReadBuffers:
    """As many buffers as are in use at a time; their contents are whatever was there before.

    Args:
        nbytes: The size of each; more where more is asked for.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: dict[bool, list[memoryview]] = {False: [], True: []}

    @contextmanager
    def lent(self, nbytes: int, *, pinned: bool = False) -> Iterator[memoryview]:
        """At least so many bytes, at an address that is a multiple of 64.

        Args:
            nbytes: How many.
            pinned: Whether a CUDA device shall copy from it behind the host's back.
        """
        free = self._free[pinned]
        try:
            found = free.pop()
        except IndexError:
            found = memoryview(b"")
        if found.nbytes < nbytes:
            found = _new(max(nbytes, self._nbytes), pinned=pinned)
        try:
            yield found
        finally:
            free.append(found)


def _new(nbytes: int, *, pinned: bool) -> memoryview:
    return tensor_bytes(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned))


__all__ = ["ReadBuffers"]

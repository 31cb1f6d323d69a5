"""Memory at an address as bytes that Python can read and write, without a copy and without numpy."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

#: All that follows an address, to take as much of it as is there: ctypes makes a class for every length of an array.
_Following: Any = ctypes.c_char * sys.maxsize


def view_memory(address: int, nbytes: int, owner: Any) -> memoryview:
    """Bytes at an address, which keep their owner alive."""
    array = _Following.from_address(address)
    array.owner = owner
    return memoryview(array).cast("B")[:nbytes]


def view_tensor(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which keep it alive."""
    nbytes = tensor.nbytes
    return view_memory(tensor.data_ptr(), nbytes, tensor) if nbytes else memoryview(bytearray())


def packed(data: bytes, nbytes: int | None = None) -> torch.Tensor:
    """A copy of the bytes, with zeros behind them, in memory that torch owns.

    A thread of gloo may free a tensor last. To free Python's memory it would need the interpreter, which may be gone.
    """
    tensor = torch.empty(len(data) if nbytes is None else nbytes, dtype=torch.uint8, device="cpu")
    view_tensor(tensor)[: len(data)] = data
    if len(data) < tensor.numel():
        tensor[len(data) :].zero_()
    return tensor


__all__ = ["packed", "view_memory", "view_tensor"]

"""Views of memory at an address as Python bytes, without a copy and without numpy."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

#: The longest array, to be sliced: for each length ctypes would create and keep a class of its own.
_Following: Any = ctypes.c_char * sys.maxsize


def view_memory(address: int, nbytes: int, owner: Any) -> memoryview:
    """Return ``nbytes`` writable bytes at an address; the view keeps ``owner`` alive."""
    array = _Following.from_address(address)
    array.owner = owner
    return memoryview(array).cast("B")[:nbytes]


def view_tensor(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes, which keep it alive; without checks."""
    nbytes = tensor.nbytes
    return view_memory(tensor.data_ptr(), nbytes, tensor) if nbytes else memoryview(bytearray())


def pack_bytes(data: bytes, nbytes: int | None = None) -> torch.Tensor:
    """Copy bytes to a uint8 tensor, of ``nbytes`` if they are given, whose memory torch owns; the rest is zeros."""
    # Not torch.frombuffer: a thread of gloo may drop the last reference to a tensor in a collective. To free Python's
    # memory it would need the interpreter's lock (GIL), at a time when the interpreter may have ended.
    tensor = torch.empty(len(data) if nbytes is None else nbytes, dtype=torch.uint8, device="cpu")
    view_tensor(tensor)[: len(data)] = data
    if len(data) < tensor.numel():
        tensor[len(data) :].zero_()
    return tensor

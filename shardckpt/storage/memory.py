"""A tensor's own memory as bytes, to write from and to read into without a copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The writable bytes of a contiguous CPU tensor; they keep the tensor alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"needs a contiguous CPU tensor, got {tensor.device} with strides {tensor.stride()}")
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def plain_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as a contiguous CPU tensor; itself if it is one already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


__all__ = ["plain_cpu", "tensor_bytes"]

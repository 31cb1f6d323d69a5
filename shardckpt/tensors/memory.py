"""A tensor's own memory as bytes, to write from and to read into without a copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from shardckpt.errors import ShardingError
from shardckpt.tensors.raw_memory import view_memory, view_tensor
from shardckpt.tensors.wrappers import dequantized, is_quantized, kind

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Bytes of a page.
PAGE = 4096
#: From this size on bytes are worth threads, and a place of their own in a file.
LARGE = 1 << 20
_ALIGNED = 64
_WITHOUT_QUEUE = ("cpu", "meta")
#: Classes of tensors that are what they seem to be.
ORDINARY = (torch.Tensor, torch.nn.Parameter)
#: Lower addresses may be offsets from null, of memory that was freed.
_LOW = 1 << 40
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_start_of_bytes = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The writable bytes of a contiguous, plain CPU tensor; they keep the tensor alive.

    Raises:
        ShardingError: it has no memory of its own.
        ValueError: the bytes of its memory are not its values (see :func:`is_plain`), or not all in a row.
    """
    if is_ordinary(tensor):
        return view_tensor(tensor)
    if not _has_memory(tensor):
        raise ShardingError(_refusal(tensor))
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not is_plain(tensor):
        raise ValueError(
            f"needs a contiguous CPU tensor without conj or neg bit, got a {type(tensor).__name__} on {tensor.device} "
            f"with strides {tensor.stride()}"
        )
    return view_tensor(tensor)


def unfilled_bytes(nbytes: int) -> tuple[bytes, memoryview]:
    """New bytes, and a writable view to fill them through before anyone else sees them.

    (A bytearray would have to be copied: fresh pages twice. https://docs.python.org/3/c-api/bytes.html)
    """
    data: bytes = _new_bytes(None, nbytes)
    if not nbytes:
        return data, memoryview(bytearray())
    return data, view_memory(_start_of_bytes(data), nbytes, data)


def plain_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as a contiguous CPU tensor; itself if it is one already.

    A subclass with a ``dequantize`` of its own (Transformer Engine's and torchao's quantized tensors) gives the values
    of that, in the dtype that it shows outwardly.

    Raises:
        ShardingError: the tensor has no memory of its own that holds its values.
    """
    if is_ordinary(tensor):
        return tensor.detach()
    values = dequantized(tensor) if is_quantized(tensor) else tensor.detach()
    if not _has_memory(values) or values.shape != tensor.shape:
        raise ShardingError(_refusal(tensor))
    return values.resolve_conj().resolve_neg().cpu().contiguous()


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether it is plainly a contiguous tensor on the CPU, whose memory's bytes are its values; quickly answered."""
    return (
        has_values_here(tensor)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def has_values_here(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a plain dtype has its values in memory of this host, in any order; quickly answered."""
    try:
        return (
            type(tensor) in ORDINARY
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and (tensor.data_ptr() > _LOW or _has_memory(tensor))
        )
    except RuntimeError:  # functorch's have no address
        return False


def page_place(tensor: torch.Tensor) -> int:
    """Where in its page a CPU tensor's memory begins, in bytes; 0 for any other, which is copied to a page's start.

    It is a multiple of 64, so that what follows is aligned: memory that is not (of a slice) counts as any other.
    """
    place = tensor.data_ptr() % PAGE if tensor.nbytes >= PAGE and is_ordinary(tensor) else 0
    return place if place % _ALIGNED == 0 else 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of the tensor's memory are its values, as its dtype and strides say."""
    return not (tensor.is_conj() or tensor.is_neg() or is_quantized(tensor)) and _has_memory(tensor)


def synchronize_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until what the caller has queued on its current streams for the tensors' devices is done.

    Other threads copy to and from these tensors on other streams: call this in the thread that computed them.
    """
    for device in {tensor.device for tensor in tensors}:
        if device.type in _WITHOUT_QUEUE:
            continue
        if hasattr(torch, "accelerator"):
            torch.accelerator.current_stream(device).synchronize()
        else:
            torch.cuda.current_stream(device).synchronize()


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for wrappers, tensors without data, layouts that are not strided, and torch's own quantized dtypes.

    (Those keep their scales beside the memory.)
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    try:
        # the storage's address: that of a part of a wrapper is its offset from null
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # tensors that only pretend (fake, functional) do not even give a null pointer
        return False


def _refusal(tensor: torch.Tensor) -> str:
    return (
        f"a {kind(tensor)} of shape {tuple(tensor.shape)} on {tensor.device} ({tensor.layout}, {tensor.dtype}) has no "
        "memory of its own that holds its values: describe a DTensor with shardckpt.adapters, and give any other as a "
        "plain tensor (its local, dequantized or dense values)"
    )


__all__ = [
    "LARGE",
    "ORDINARY",
    "PAGE",
    "has_values_here",
    "is_ordinary",
    "is_plain",
    "page_place",
    "plain_cpu",
    "synchronize_devices",
    "tensor_bytes",
    "unfilled_bytes",
]

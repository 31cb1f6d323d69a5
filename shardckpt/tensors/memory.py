"""A tensor's own memory as bytes, to write from and to read into without a copy."""

from __future__ import annotations

import ctypes
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import ShardingError
from shardckpt.tensors.raw_memory import view_memory, view_tensor
from shardckpt.tensors.wrappers import dequantize, is_quantized, kind, movable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Bytes of a page.
PAGE = 4096
#: Bytes. Larger tensors are worth several threads, and begin at a suitable address in a file; see `page_offset`.
LARGE = 1 << 20
_ALIGNED = 64
_WITHOUT_QUEUE = ("cpu", "meta")
#: Classes whose tensors hold their values in their own memory; a subclass may wrap others.
ORDINARY = (torch.Tensor, torch.nn.Parameter)
#: Classes whose strides are the strides of their memory, as a wrapper's are not.
_OF_STRIDES = frozenset((*ORDINARY, torch.nn.Buffer))
#: torch's own quantized dtypes, whose scales are not in a tensor's memory.
QUANTIZED_DTYPES = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))
#: Lower addresses may be offsets from a null pointer, as of a tensor whose storage was freed.
_LOW = 1 << 40
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_start_of_bytes = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous, plain CPU tensor as writable bytes, without a copy.

    Args:
        tensor: Any shape and dtype; the view keeps it alive.

    Returns:
        The bytes, in row-major order.

    Raises:
        ShardingError: the tensor has no memory of its own.
        ValueError: the bytes of its memory are not its values (see :func:`is_plain`), or it is not contiguous.
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


def tensor_bytes_of_each(tensors: Sequence[torch.Tensor]) -> list[memoryview] | None:
    """Return :func:`tensor_bytes` of each tensor; None if :func:`is_ordinary` is False for one of them.

    It takes a fifth of the time that a call for each tensor takes.
    """
    starts = find_addresses(tensors)
    if starts is None:
        return None
    sizes = list(map(attrgetter("nbytes"), tensors))
    filled = [(start, start + nbytes) for start, nbytes in zip(starts, sizes, strict=True) if nbytes]
    if not filled:
        return [memoryview(b"")] * len(sizes)
    # One view of the addresses from the first to the last, whose slices are cheap; nothing else in it is touched.
    low = min(filled)[0]
    span = view_memory(low, max(filled)[1] - low, tensors)
    return [
        span[start - low : start - low + nbytes] if nbytes else span[:0]
        for start, nbytes in zip(starts, sizes, strict=True)
    ]


def find_addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return the address of each tensor's memory; None if :func:`is_ordinary` is False for one of them, or may be."""
    found = find_host_addresses(tensors)
    return found if found is not None and are_contiguous(tensors, map(attrgetter("dtype"), tensors)) else None


def unfilled_bytes(nbytes: int) -> tuple[bytes, memoryview]:
    """Return new bytes, and a writable view of them, to be filled before any other code uses them."""
    # A bytearray would have to be copied to become bytes, which touches fresh pages twice. CPython allows the write to
    # new bytes: https://docs.python.org/3/c-api/bytes.html
    data: bytes = _new_bytes(None, nbytes)
    if not nbytes:
        return data, memoryview(bytearray())
    return data, view_memory(_start_of_bytes(data), nbytes, data)


def plain_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as a contiguous CPU tensor, detached; without a copy if it is one.

    A subclass with a ``dequantize`` of its own (Transformer Engine's and torchao's quantized tensors) is dequantized to
    its outward dtype.

    Raises:
        ShardingError: the tensor has no memory of its own that holds its values.
    """
    if is_ordinary(tensor):
        return tensor.detach()
    values = dequantize(tensor) if is_quantized(tensor) else tensor.detach()
    if not _has_memory(values) or values.shape != tensor.shape:
        raise ShardingError(_refusal(tensor))
    values = values.resolve_conj().resolve_neg().cpu()
    return movable(values).contiguous().view(values.dtype)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is contiguous, on the CPU, and its memory's bytes are its values; fast.

    False negatives are possible, of subclasses: :func:`is_plain` answers those.
    """
    return (
        has_values_on_host(tensor)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a strided tensor are one place in memory, as in an expanded one."""
    if type(tensor) not in _OF_STRIDES or tensor.is_contiguous():
        return False
    axes = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for step, size in axes:
        if step <= reach:  # it may be; most tensors have no such axis
            break
        reach += step * (size - 1)
    else:
        return False
    if not axes[0][0] or sum(step * (size - 1) for step, size in axes) + 1 < tensor.numel():
        return True
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for step, size in axes:
        places = places.unsqueeze(-1) + torch.arange(0, step * size, step, device="cpu")
    return len(set(places.view(-1).tolist())) < tensor.numel()


def has_values_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the tensor holds its values in CPU memory, with any strides; fast."""
    try:
        return (
            type(tensor) in ORDINARY
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and (tensor.data_ptr() > _LOW or _has_memory(tensor))
        )
    except RuntimeError:  # functorch's tensors have no address
        return False


def find_host_addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return where each tensor begins in the host's memory, with any strides.

    None if :func:`has_values_on_host` is False for a tensor, or may be: ask for each then. It asks each question of all
    tensors, which is fast.
    """
    return read_addresses(tensors) if all(map(attrgetter("is_cpu"), tensors)) else None


def read_addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return the address of each tensor's memory, of tensors that are on the CPU."""
    if not set(map(type, tensors)) <= set(ORDINARY):
        return None
    try:
        found = list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # sparse tensors, mkldnn's and functorch's have no address
        return None
    # an empty tensor may have none
    is_known = min(found, default=_LOW + 1) > _LOW or all(
        start > _LOW or not tensor.numel() for start, tensor in zip(found, tensors, strict=True)
    )
    return found if is_known else None


def are_contiguous(tensors: Sequence[torch.Tensor], dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether the values of tensors on the host are the bytes of their memory, one after the other."""
    kinds = set(dtypes)
    return (
        kinds.isdisjoint(QUANTIZED_DTYPES)
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not (any(kind.is_complex for kind in kinds) and any(map(torch.Tensor.is_conj, tensors)))
        and not any(map(torch.Tensor.is_neg, tensors))
    )


def page_offset(tensor: torch.Tensor) -> int:
    """Return the offset of a tensor's memory in its page, in bytes, which its place in a file should have, too.

    It is a multiple of 64, so that the next record in the file is aligned; 0 for tensors that are not written from
    their own memory, are small, or whose memory is less aligned (a slice).
    """
    # a direct write (O_DIRECT) takes the memory without a copy where both offsets are equal modulo the page size
    place = tensor.data_ptr() % PAGE if tensor.nbytes >= PAGE and is_ordinary(tensor) else 0
    return place if place % _ALIGNED == 0 else 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of the tensor's memory are its values, in its dtype and strides."""
    return not (tensor.is_conj() or tensor.is_neg() or is_quantized(tensor)) and _has_memory(tensor)


def view_key(tensor: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal for equal views of one memory; None for a tensor without plain memory, or elements."""
    plain = type(tensor) in ORDINARY and tensor.layout == torch.strided and not tensor.is_meta
    if not plain or not tensor.numel():  # empty tensors may all have address 0
        return None
    # a conjugate or negative view has the same memory but other values
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), lazy


def synchronize_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all work that this thread has queued on its current streams of the tensors' devices.

    Other threads copy these tensors on other streams, which do not wait for the current ones: so call it first, in the
    thread that computed the tensors.
    """
    for device in {tensor.device for tensor in tensors}:
        if device.type not in _WITHOUT_QUEUE:
            torch.accelerator.current_stream(device).synchronize()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own that holds its values: wrappers and sparse tensors have none."""
    # torch's own quantized dtypes keep their scales outside the memory
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    try:
        # the storage's address, because data_ptr() of a part of a wrapper is its offset from a null pointer
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # fake and functional tensors raise instead of returning a null pointer
        return False


def _refusal(tensor: torch.Tensor) -> str:
    return (
        f"a {kind(tensor)} of shape {tuple(tensor.shape)} on {tensor.device} ({tensor.layout}, {tensor.dtype}) has no "
        "memory of its own that holds its values: describe a DTensor with shardckpt.adapters, and give any other as a "
        "plain tensor (its local, dequantized or dense values)"
    )

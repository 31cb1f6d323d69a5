"""Quantized tensors: wrapper subclasses that hold low-precision data and scales, and have a high-precision dtype."""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException, ShardingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeGuard

#: Dtypes of this release for which torch implements almost no operation, copies included.
_BARE = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
)
#: Names of class methods of torchao's that quantize a high-precision tensor.
_MAKERS = ("from_hp", "to_mx", "to_nvfp4")
#: Name of a method of torchao's NF4Tensor, whose ``dequantize`` is of single codes.
_GETTER = "get_original_weight"
#: Prefix of inner tensors of torchao's that describe activations: they are not part of the tensor's values.
_OF_ACTIVATIONS = "act_"


def is_quantized(tensor: object) -> TypeGuard[torch.Tensor]:
    """Return whether the tensor's class has a ``dequantize`` of its own, like Transformer Engine's and torchao's."""
    return isinstance(tensor, torch.Tensor) and type(tensor).dequantize is not torch.Tensor.dequantize


def dequantize(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a quantized tensor as a plain tensor of its outward dtype, on its device.

    It is a ShardingError if its ``dequantize`` fails, or the outward dtype cannot hold the values.
    """
    try:
        with torch.no_grad(), _on(tensor.device):
            values = getattr(tensor, _GETTER, tensor.dequantize)()
    except CheckpointingException:  # of this library: of a tensor that is read from a checkpoint
        raise
    except Exception as exc:
        raise ShardingError(f"a {kind(tensor)} failed to dequantize: {type(exc).__name__}: {exc}") from exc
    if values.dtype != tensor.dtype and not _is_high_precision(tensor):
        raise ShardingError(
            f"a {kind(tensor)} shows the dtype {tensor.dtype} and dequantizes to {values.dtype}, which that cannot "
            "hold: give its dequantized values as a plain tensor, and describe that"
        )
    return values.to(tensor.dtype)


def fill(key: str, destination: torch.Tensor, values: torch.Tensor) -> None:
    """Copy plain values into a tensor, cast to its dtype, or quantized into its memory with its configuration.

    The values have the destination's shape, and any dtype and device. To quantize, it uses the first of these that the
    destination has: its ``quantize_`` (Transformer Engine 2); a class method that quantizes, called with the
    destination's configuration (torchao; properties that a tensor does not store, as the choice of scales, are the
    method's default); its ``copy_`` (Transformer Engine 1). If it has none that works, it is a ShardingError; the
    destination is unchanged unless its method failed halfway.
    """
    if not is_quantized(destination):
        copy_values(destination.detach(), values)
        return
    check_destination(key, destination)
    try:
        with torch.no_grad(), _on(destination.device):
            _quantize(destination, values.to(destination.device, destination.dtype))
    except Exception as exc:
        raise ShardingError(_refusal(key, destination, f"{type(exc).__name__}: {exc}")) from exc


def copy_values(destination: torch.Tensor, values: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy plain values into a plain tensor of the same shape, cast to its dtype."""
    # cast first for a view with the neg bit: torch loses the signs where it casts and copies at once
    if values.dtype != destination.dtype:
        values = values.to(destination.dtype) if destination.is_neg() or values.is_neg() else values
    elif values.dtype in _BARE:
        destination, values = movable(destination), movable(values)
    destination.copy_(values, non_blocking=non_blocking)


def copy_box(values: torch.Tensor, start: Sequence[int], target: torch.Tensor) -> None:
    """Copy the box of the target's shape that begins at ``start`` in values, and cast it to the target's dtype."""
    if values.shape != target.shape:  # else it is all of them, as often
        for axis, (first, length) in enumerate(zip(start, target.shape, strict=True)):
            values = values.narrow(axis, first, length)
    copy_values(target, values)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, viewed as integers of the same size if torch cannot fill or copy its dtype."""
    if tensor.dtype not in _BARE:
        return tensor
    return tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)


def check_destination(key: str, destination: torch.Tensor) -> None:
    """Raise :class:`ShardingError` if high-precision values cannot be quantized into a quantized tensor."""
    if not _is_high_precision(destination):
        raise ShardingError(_refusal(key, destination, f"its outward dtype {destination.dtype} cannot hold its values"))
    blocks = getattr(destination, "n_blocks", 0) if hasattr(destination, _GETTER) else 0
    # a shard has the number of blocks of the whole; its scales are relative to a mean that must be equal on all ranks
    if blocks and blocks * getattr(destination, "block_size", 0) != destination.numel():
        why = "it is a shard, whose scales share one mean with other ranks' shards: load before the model is quantized"
        raise ShardingError(_refusal(key, destination, why))


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that hold a wrapper's values, by name: by torch's flatten protocol, or else its attributes."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    found = vars(tensor) if flatten is None else {name: getattr(tensor, name) for name in flatten()[0]}
    return {
        name: inner
        for name, inner in found.items()
        if isinstance(inner, torch.Tensor) and not name.startswith(_OF_ACTIVATIONS)
    }


def kind(tensor: torch.Tensor) -> str:
    """Return the full name of the tensor's class, for errors."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _is_high_precision(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager in which it is this thread's current device."""
    # wrappers launch their kernels on the current device, which is the first one in a new thread
    return nullcontext() if device.type in ("cpu", "meta") else torch.get_device_module(device).device(device)


def _quantize(destination: torch.Tensor, values: torch.Tensor) -> None:
    quantize = getattr(destination, "quantize_", None)
    maker = next((name for name in _MAKERS if hasattr(type(destination), name)), None)
    if quantize is not None:
        quantize(values)
    elif maker is not None and hasattr(destination, "__tensor_flatten__"):
        _replace(destination, getattr(type(destination), maker), values)
    else:
        destination.copy_(values)


def _replace(destination: Any, make: Callable[..., Any], values: torch.Tensor) -> None:
    """Quantize by the class's own method, and copy the inner tensors of the result into the destination's."""
    names, context = destination.__tensor_flatten__()
    parameters = inspect.signature(make).parameters
    new = make(values, **_configuration(destination, values, {*names, *context} & parameters.keys(), parameters))
    new_names, new_context = new.__tensor_flatten__()
    pairs = [(getattr(destination, name), getattr(new, name)) for name in names if name in new_names]
    # compared before anything is copied: a destination that does not fit stays as it is
    is_same_form = all(old.shape == other.shape and old.dtype == other.dtype for old, other in pairs)
    if sorted(names) != sorted(new_names) or not is_same_form or not _same(context, new_context):
        raise ValueError(f"{make.__qualname__} quantizes to {_form(new)}, the destination has {_form(destination)}")
    for old, other in pairs:
        old.copy_(other)


def _configuration(
    destination: Any, values: torch.Tensor, shown: Iterable[str], parameters: Iterable[str]
) -> dict[str, Any]:
    """Return the keyword arguments of a quantizing method, from its configuration; scales come from the values."""
    inner = inner_tensors(destination)
    known = {name: getattr(destination, name) for name in shown if name not in inner}
    if "float8_dtype" in parameters:
        known["float8_dtype"] = destination.qdata.dtype
    if "granularity" in parameters:
        known["granularity"] = _granularity(tuple(destination.block_size), tuple(destination.shape))
    if "mapping_type" in parameters and "zero_point" in inner and inner["zero_point"].any():
        known["mapping_type"] = sys.modules["torchao.quantization.quant_primitives"].MappingType.ASYMMETRIC
    if "per_tensor_scale" in parameters and "per_tensor_scale" in inner:
        to_scale = sys.modules[type(destination).__module__].per_tensor_amax_to_scale
        known["per_tensor_scale"] = to_scale(values.abs().max())
    return known


def _granularity(block: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Return torchao's granularity for a block shape; its module is loaded, since the tensor is of torchao's."""
    names = sys.modules["torchao.quantization.granularity"]
    wide = [axis for axis, size in enumerate(block) if size != 1]
    if block == shape:
        return names.PerTensor()
    if len(wide) == 1 and block[wide[0]] == shape[wide[0]]:
        return names.PerRow(wide[0])
    return names.PerBlock(block)


def _same(context: dict[str, Any], other: dict[str, Any]) -> bool:
    return {name: _plain(value) for name, value in context.items()} == {n: _plain(value) for n, value in other.items()}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _form(tensor: Any) -> str:
    names, context = tensor.__tensor_flatten__()
    inner = {name: (tuple(getattr(tensor, name).shape), getattr(tensor, name).dtype) for name in names}
    return f"{inner} with {context}"


def _refusal(key: str, destination: torch.Tensor, why: str) -> str:
    return (
        f"{key!r}: its destination is a {kind(destination)}, into which loaded values cannot be quantized ({why}): "
        "load into a plain tensor in high precision, or into a ShardedTensor without data, and quantize that yourself"
    )

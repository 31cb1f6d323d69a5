"""Quantized tensors: wrapper subclasses that hold 8-bit data and scales inside, and show high precision outside."""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import ShardingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import TypeGuard

#: dtypes of which torch has little more than the name, as far as this torch has them: packed and odd ones.
_BARE = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
)
#: Constructors from high precision that classes of torchao offer.
_MAKERS = ("from_hp", "to_mx", "to_nvfp4")
#: Inner tensors of torchao's that describe activations: they are no part of the tensor's own values.
_OF_ACTIVATIONS = "act_"


def is_quantized(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether it is of a tensor class with a ``dequantize`` of its own: Transformer Engine's, torchao's, and alike."""
    return isinstance(tensor, torch.Tensor) and type(tensor).dequantize is not torch.Tensor.dequantize


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a quantized tensor, in the dtype that it shows outwardly.

    Raises:
        ShardingError: it cannot give them, or that dtype cannot hold them.
    """
    try:
        with torch.no_grad(), _on(tensor.device):
            values = tensor.dequantize()
    except Exception as exc:
        raise ShardingError(f"a {kind(tensor)} failed to dequantize: {type(exc).__name__}: {exc}") from exc
    if values.dtype != tensor.dtype and not _is_high_precision(tensor):
        raise ShardingError(
            f"a {kind(tensor)} shows the dtype {tensor.dtype} and dequantizes to {values.dtype}, which that cannot "
            "hold: give its dequantized values as a plain tensor, and describe that"
        )
    return values.to(tensor.dtype)


def fill(key: str, destination: torch.Tensor, values: torch.Tensor) -> None:
    """Copy plain values into a tensor, casting or quantizing as it needs; ``key`` is named in errors."""
    if is_quantized(destination):
        requantize(key, destination, values)
    else:
        copy_values(destination.detach(), values)


def copy_values(destination: torch.Tensor, values: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy plain values, cast to the destination's dtype; torch loses signs where it casts into a negated view."""
    if values.dtype != destination.dtype:
        values = values.to(destination.dtype) if destination.is_neg() else values
    elif values.dtype in _BARE:
        destination, values = movable(destination), movable(values)
    destination.copy_(values, non_blocking=non_blocking)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, over integers of its elements' size if torch has nothing to fill or copy those with."""
    if tensor.dtype not in _BARE:
        return tensor
    return tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)


def requantize(key: str, destination: torch.Tensor, values: torch.Tensor) -> None:
    """Quantize plain values into a quantized tensor's own memory, as that one is quantized.

    The first of these that the destination has: its ``quantize_`` (Transformer Engine 2); a constructor of its class
    from high precision, called with the configuration that the destination shows (torchao; what it does not keep, a
    way to choose scales, is the constructor's default); its ``copy_`` (Transformer Engine 1).

    Args:
        key: Named in errors.
        destination: Filled in place.
        values: Of the destination's shape.

    Raises:
        ShardingError: it cannot; the destination is as it was unless its own method failed halfway.
    """
    check_outward_dtype(key, destination)
    try:
        with torch.no_grad(), _on(destination.device):
            _quantize(destination, values.to(destination.device, destination.dtype))
    except Exception as exc:
        raise ShardingError(_refusal(key, destination, f"{type(exc).__name__}: {exc}")) from exc


def check_outward_dtype(key: str, destination: torch.Tensor) -> None:
    """Raise :class:`ShardingError` if the dtype that a quantized tensor shows could not hold values to quantize."""
    if not _is_high_precision(destination):
        raise ShardingError(_refusal(key, destination, f"its outward dtype {destination.dtype} cannot hold its values"))


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that hold a wrapper's values, by name: as torch's flatten protocol says, or else its attributes."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    found = vars(tensor) if flatten is None else {name: getattr(tensor, name) for name in flatten()[0]}
    return {
        name: inner
        for name, inner in found.items()
        if isinstance(inner, torch.Tensor) and not name.startswith(_OF_ACTIVATIONS)
    }


def kind(tensor: torch.Tensor) -> str:
    """The full name of its class."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _is_high_precision(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes it this thread's current device: kernels of wrappers run there, and threads begin with the first."""
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
    """Quantize anew by the class's own constructor, and copy what that gives into the inner tensors."""
    names, context = destination.__tensor_flatten__()
    parameters = inspect.signature(make).parameters
    made = make(values, **_configuration(destination, values, {*names, *context} & parameters.keys(), parameters))
    made_names, made_context = made.__tensor_flatten__()
    pairs = [(getattr(destination, name), getattr(made, name)) for name in names if name in made_names]
    alike = all(old.shape == new.shape and old.dtype == new.dtype for old, new in pairs)
    if sorted(names) != sorted(made_names) or not alike or not _same(context, made_context):
        raise ValueError(f"{make.__qualname__} quantizes to {_form(made)}, the destination has {_form(destination)}")
    for old, new in pairs:
        old.copy_(new)


def _configuration(
    destination: Any, values: torch.Tensor, shown: Iterable[str], parameters: Iterable[str]
) -> dict[str, Any]:
    """What a constructor takes of the configuration that a tensor shows; scales are chosen anew."""
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
    """The name in torchao for blocks of a shape; its module is loaded, for the tensor is of one of its classes."""
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
        "load into a plain tensor (data=None, or one in high precision), and quantize that yourself"
    )


__all__ = [
    "check_outward_dtype",
    "copy_values",
    "dequantized",
    "fill",
    "inner_tensors",
    "is_quantized",
    "kind",
    "movable",
    "requantize",
]

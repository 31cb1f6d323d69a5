"""Tensor classes that behave as Transformer Engine's quantized tensors do, without its kernels.

What they share with those: no memory of their own and no views of it, ``dequantize(*, dtype=None)``, ``detach`` that
shares what is inside, ``copy_`` that quantizes, and any other operation on dequantized copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max


class QuantizedStandIn(torch.Tensor):
    """What Transformer Engine 2's classes have in common; a subclass says how values become ``_data`` and scales."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    #: Times that values were quantized into it.
    times: int

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> Any:
        """A tensor around its data and scales."""
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype)
        made._data, made._scale_inv, made.times = data, scale_inv, 0
        return made

    @classmethod
    def quantized(cls, values: torch.Tensor) -> Any:
        """A new tensor of these values."""
        return cls(*cls.encode(values), values.dtype)

    @staticmethod
    def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and inverse scales."""
        raise NotImplementedError

    def decode(self) -> torch.Tensor:
        """The values, in float32."""
        raise NotImplementedError

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values."""
        return self.decode().to(dtype or self.dtype)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> QuantizedStandIn:
        """Take other values; the scales are chosen anew."""
        return self.take(tensor)

    def take(self, values: torch.Tensor) -> QuantizedStandIn:
        """Overwrite what is inside."""
        if type(values) is not torch.Tensor or values.shape != self.shape or not values.is_contiguous():
            raise ValueError(f"cannot quantize a {type(values).__name__} of {values.shape}")
        data, scale_inv = self.encode(values)
        self._data.copy_(data)
        self._scale_inv.copy_(scale_inv)
        self.times += 1
        return self

    def bits(self) -> tuple[bytes, bytes]:
        """All that is inside."""
        return self._data.numpy().tobytes(), self._scale_inv.numpy().tobytes()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detach and copy_; no views of other shapes; all else on copies."""
        aten = torch.ops.aten
        if func is aten.detach.default or (func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
            return type(args[0])(args[0]._data, args[0]._scale_inv, args[0].dtype)
        if func is aten.copy_.default and isinstance(args[0], QuantizedStandIn):
            return args[0].take(args[1])
        if func is aten.view.default:
            raise NotImplementedError(f"{cls.__name__} has no views of other shapes")
        if func._schema.is_mutable and isinstance(args[0], QuantizedStandIn):
            raise NotImplementedError(func)
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class Float8StandIn(QuantizedStandIn):
    """One scale for the tensor, as Float8Tensor has it."""

    @staticmethod
    def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of float8, and amax over the largest float8."""
        scale_inv = (values.float().abs().amax() / _FP8_MAX).clamp(min=1e-12).reshape(1)
        return (values.float() / scale_inv).to(_FP8).view(torch.uint8), scale_inv

    def decode(self) -> torch.Tensor:
        """Data times scale."""
        return self._data.view(_FP8).float() * self._scale_inv


class MXFP8StandIn(QuantizedStandIn):
    """A power of two for every 32 values of a row, as MXFP8Tensor has it; rows are whole blocks."""

    @staticmethod
    def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of float8, and biased exponents."""
        blocks = values.float().unflatten(-1, (-1, 32))
        exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / _FP8_MAX)).clamp(-127, 127)
        data = (blocks / torch.exp2(exponent)[..., None]).to(_FP8).view(torch.uint8)
        return data.flatten(-2), (exponent + 127).to(torch.uint8)

    def decode(self) -> torch.Tensor:
        """Blocks times their scales."""
        blocks = self._data.view(_FP8).float().unflatten(-1, (-1, 32))
        return (blocks * torch.exp2(self._scale_inv.float() - 127)[..., None]).flatten(-2)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """The flatten protocol of torch, which some classes follow."""
        return ["_data", "_scale_inv"], {"fp8_dtype": _FP8, "dtype": self.dtype}


class FirstFloat8StandIn(Float8StandIn):
    """Transformer Engine 1's: no ``quantize_``, only ``copy_``."""

    quantize_ = None  # type: ignore[assignment]


class ClosedStandIn(Float8StandIn):
    """A class that gives its values and takes none."""

    quantize_ = None  # type: ignore[assignment]

    def take(self, values: torch.Tensor) -> QuantizedStandIn:
        """Refused."""
        raise NotImplementedError("it is closed")


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedStandIn) else value


__all__ = ["ClosedStandIn", "FirstFloat8StandIn", "Float8StandIn", "MXFP8StandIn", "QuantizedStandIn"]

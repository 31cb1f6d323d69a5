"""Tensors without memory, whose values a function returns when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.tensors.torch_private import map_arguments, new_wrapper

if TYPE_CHECKING:
    from collections.abc import Callable


class DeferredTensor(torch.Tensor):
    """A contiguous CPU tensor without memory: a function returns its values each time they are needed.

    A save strategy writes it as it writes a quantized tensor: :func:`shardckpt.tensors.plain_cpu`, called when the
    writer takes the bytes, asks :meth:`dequantize` for the values. So a save holds a few of many such tensors at a time.
    An operation of torch gets the values, too, and returns ordinary tensors.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        read: Returns the values: a plain CPU tensor of that shape and dtype, which nobody may change.
    """

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> DeferredTensor:
        made: DeferredTensor = new_wrapper(cls, shape, dtype)
        made._read = read
        return made

    _read: Callable[[], torch.Tensor]

    def dequantize(self) -> torch.Tensor:
        """Return the values."""
        return self._read()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a numpy array."""
        return self._read().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._read().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG003
        """Run an operation on the values; a detached one is deferred as well."""
        if func is torch.ops.aten.detach.default:  # type: ignore[attr-defined]
            (tensor,) = args
            return DeferredTensor(tuple(tensor.shape), tensor.dtype, tensor._read)
        args, kwargs = map_arguments(DeferredTensor, DeferredTensor.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # noqa: ARG002 - torch's own has it
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"


__all__ = ["DeferredTensor"]

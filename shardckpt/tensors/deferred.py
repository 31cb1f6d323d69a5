"""Tensors without memory, whose values a function returns when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.tensors.torch_private import map_arguments, new_wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self


class DeferredTensor(torch.Tensor):
    """A contiguous CPU tensor without memory: a function returns its values each time they are needed.

    A save strategy writes it as it writes a quantized tensor: :func:`shardckpt.tensors.plain_cpu`, called when the
    writer takes the bytes, asks :meth:`dequantize` for the values. So a save holds a few such tensors at a time. An
    operation of torch gets the values, too, and returns ordinary tensors.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        read: Returns the values: a plain CPU tensor of that shape and dtype, not to be changed.
    """

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Self:  # noqa: ARG004, D102
        return new_wrapper(cls, shape, dtype)  # type: ignore[no-any-return]

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> None:  # noqa: ARG002
        self._read = read

    def dequantize(self) -> torch.Tensor:
        """Return the values."""
        return self._read()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a numpy array."""
        return self._read().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # an ordinary tensor where it arrives: the function cannot go to a file or another process
        reduce: Any = self._read().__reduce_ex__
        return reduce(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the values; a detached one is deferred as well."""
        if func is torch.ops.aten.detach.default:
            (tensor,) = args
            return cls(tuple(tensor.shape), tensor.dtype, tensor._read)  # noqa: SLF001
        args, kwargs = map_arguments(cls, cls.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

"""Quantized tensors in state dicts: stored as they are, bit for bit, or replaced by their dequantized values."""

from __future__ import annotations

from typing import Any

import torch

from shardckpt.errors import ShardingError
from shardckpt.mapping import ReplicaId, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.tensors import is_quantized, kind

#: Names the object that tells the form; no inner tensor can be an attribute of that name.
_FORM = "class"


def native_factory(
    key: str, tensor: torch.Tensor, *rank_offsets: tuple[int, int, int], replica_id: ReplicaId = 0, **kwargs: Any
) -> ShardedTensorFactory:
    """Describe a wrapper tensor by the tensors inside it: a round trip changes no bit, and chooses no scale anew.

    They are stored as ``<key>.<inner name>``, beside an object ``<key>.class`` that tells class and dtypes; a load
    fills those inside ``tensor`` and gives it back. It must be quantized as the saved one was.

    Args:
        key: Of the tensor.
        tensor: Of a class with torch's ``__tensor_flatten__``, as torchao's have it.
        rank_offsets: Tuples (axis, i, n), as for :meth:`ShardedTensor.from_rank_offsets`; none for a whole tensor.
        replica_id: See :class:`ShardedTensor`.
        **kwargs: More of :meth:`ShardedTensor.from_rank_offsets`, for every inner tensor.

    Raises:
        ShardingError: the class does not follow the protocol, an inner tensor cannot be split as the tensor is, or,
            after a load, class or dtypes are not those that were saved.
    """
    axes = [axis - kwargs.get("prepend_axis_num", 0) for axis, _, _ in rank_offsets]

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, _: slice | None) -> dict[str, Any]:
        first = not any(cell for _, cell, _ in rank_offsets)
        form = ShardedObject(f"{key}.{_FORM}", _form(key, data), (1,), (0,), replica_id if first else 1)
        inner = _inner(key, data, [axis for axis in axes if axis >= 0])
        return {_FORM: form} | {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, *rank_offsets, replica_id=replica_id, **kwargs)
            for name, part in inner.items()
        }

    def merge(loaded: dict[str, Any]) -> torch.Tensor:
        if loaded[_FORM] != (wanted := _form(key, tensor)):
            raise ShardingError(
                f"{key!r} was saved as {loaded[_FORM]}, and loaded into {wanted}, whose values are now wrong: give a "
                "tensor that is quantized as the saved one was"
            )
        return tensor

    _inner(key, tensor, [axis for axis in axes if axis >= 0])
    return ShardedTensorFactory(key, tensor, build, merge, replica_id)


def is_native_factory(leaf: object) -> bool:
    """Whether a leaf of a sharded state dict is what :func:`native_factory` made."""
    return isinstance(leaf, ShardedTensorFactory) and leaf.build_fn.__module__ == __name__


def _inner(key: str, tensor: Any, split: list[int]) -> dict[str, torch.Tensor]:
    """The tensors inside, if they can be stored in the tensor's place and split along the same axes."""
    if not hasattr(tensor, "__tensor_flatten__"):
        raise ShardingError(f"{key!r}: a {kind(tensor)} has no __tensor_flatten__ that names the tensors inside it")
    names, context = tensor.__tensor_flatten__()
    inner: dict[str, torch.Tensor] = {name: getattr(tensor, name) for name in names}
    swizzled = isinstance(context, dict) and context.get("is_swizzled_scales")
    for name, part in inner.items():
        alike = part.ndim == tensor.ndim and all(part.shape[a] and not tensor.shape[a] % part.shape[a] for a in split)
        if is_quantized(part) or (split and (swizzled or not alike)):
            raise ShardingError(
                f"{key!r}: {name} of shape {tuple(part.shape)} in a {kind(tensor)} of shape {tuple(tensor.shape)} is "
                f"quantized itself, or does not follow its rows and columns, which are split along {split}: store its "
                "dequantized values, by a ShardedTensor of it"
            )
    return inner


def _form(key: str, tensor: Any) -> str:
    """Class and dtypes, in words: what bits mean."""
    _, context = tensor.__tensor_flatten__()
    dtypes = {name: part.dtype for name, part in _inner(key, tensor, []).items()}
    inside = context.items() if isinstance(context, dict) else ()
    dtypes |= {name: value for name, value in inside if isinstance(value, torch.dtype) and value != tensor.dtype}
    return f"{type(tensor).__qualname__}({', '.join(f'{name}={dtype}' for name, dtype in sorted(dtypes.items()))})"


__all__ = ["is_native_factory", "native_factory"]

"""Quantized tensors in state dicts: how to store them bit for bit. Without this they are stored dequantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import ShardingError
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import BlockScales, ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject
from shardckpt.tensors.inner import flatten_tensor
from shardckpt.tensors.wrappers import is_quantized, kind

if TYPE_CHECKING:
    from shardckpt.mapping.base import ReplicaId

#: Names of the object that stores the class and the dtypes, and of what a load returns, which is not stored; no
#: attribute, and so no inner tensor, can have one of them.
_FORM, _WHOLE = "class", "(whole)"
#: The tensors inside torchao's block-scaled classes.
_CODES, _SCALES = "qdata", "scale"


def native_factory(
    key: str, tensor: torch.Tensor, *rank_offsets: tuple[int, int, int], replica_id: ReplicaId = 0, **kwargs: Any
) -> ShardedTensorFactory:
    """Describe a wrapper tensor by the tensors inside it: a save and a load change no bit, and keep the scales.

    The inner tensors are stored as ``<key>.<inner name>``, and an object ``<key>.class`` has the class and the dtypes.
    Of torchao's classes whose ``scale`` has an element for each block of ``qdata``, that is stated by ``block_scales``.
    A load fills the tensors inside ``tensor``, which must be quantized as the saved one was.

    Example:
        Rank ``r`` of ``n`` has equal blocks of rows of a quantized weight::

            state_dict["weight"] = native_factory("decoder.weight", model.weight, (0, r, n))

    Args:
        key: Name of the global tensor.
        tensor: The local tensor, of a class with torch's ``__tensor_flatten__``, such as torchao's.
        rank_offsets: Tuples (axis, i, n), as for :meth:`ShardedTensor.from_rank_offsets`; none if it is not sharded.
        replica_id: See :class:`ShardedTensor`.
        **kwargs: More arguments of :meth:`ShardedTensor.from_rank_offsets`, for every inner tensor.

    Returns:
        A leaf for the sharded state dict; a load replaces it by ``tensor``.

    Raises:
        ShardingError: the class has no ``__tensor_flatten__``, there is no such shard of it, an inner tensor cannot be
            split as ``tensor`` is, or, when a load ends, the stored class or dtypes differ from ``tensor``'s.
    """
    original = key, tensor
    whole = ShardedTensor.from_rank_offsets(key, tensor, *rank_offsets, replica_id=replica_id, **kwargs)
    prepended = whole.prepend_axis_num
    split = [axis - prepended for axis, _, _ in rank_offsets if axis >= prepended]
    is_first = not any(cell for _, cell, _ in rank_offsets)

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, _: slice | None) -> dict[str, Any]:
        copy, shared = replica_id if is_first else 1, whole.replicated
        form = ShardedObject(f"{key}.{_FORM}", _form(key, data), (1,), (0,), copy, replicated=shared)
        inner = _inner(key, data, split)
        # a copy of the factory may have another key and other data: an optimizer's state has its parameter's factory
        found: dict[str, Any] = {_FORM: form, _WHOLE: LocalNonpersistentObject((key, data))} | {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, *rank_offsets, replica_id=replica_id, **kwargs)
            for name, part in inner.items()
        }
        if block := _find_block(inner):
            found[_CODES].block_scales = BlockScales(f"{key}.{_SCALES}", (1,) * prepended + block)
        return found

    def merge(loaded: dict[str, Any]) -> torch.Tensor:
        key, tensor = loaded.get(_WHOLE) or original  # a caller may build and merge by itself
        if loaded[_FORM] != (wanted := _form(key, tensor)):
            raise ShardingError(
                f"{key!r} was saved as {loaded[_FORM]}, and loaded into {wanted}, whose values are now wrong: pass a "
                "tensor that is quantized as the saved one was"
            )
        return tensor

    _inner(key, tensor, split)  # raises here, not when the state dict is saved
    return ShardedTensorFactory(key, tensor, build, merge, replica_id)


def is_native_factory(leaf: object) -> bool:
    """Return whether a leaf of a sharded state dict was made by :func:`native_factory`."""
    return isinstance(leaf, ShardedTensorFactory) and leaf.build_fn.__module__ == __name__


def _inner(key: str, tensor: Any, split: list[int]) -> dict[str, torch.Tensor]:
    """Return the tensors inside by name; raise ShardingError if they cannot be stored, or not split along the axes."""
    if not hasattr(tensor, "__tensor_flatten__"):
        raise ShardingError(f"{key!r}: a {kind(tensor)} has no __tensor_flatten__ that names the tensors inside it")
    inner, context = flatten_tensor(tensor)
    swizzled = isinstance(context, dict) and context.get("is_swizzled_scales")
    for name, part in inner.items():
        fits = part.ndim == tensor.ndim and all(part.shape[a] and not tensor.shape[a] % part.shape[a] for a in split)
        if is_quantized(part) or (split and (swizzled or not fits)):
            raise ShardingError(
                f"{key!r}: {name} of shape {tuple(part.shape)} in a {kind(tensor)} of shape {tuple(tensor.shape)} is "
                f"quantized itself, or cannot be split with it along axes {split}: store its dequantized values, as a "
                "ShardedTensor of it"
            )
    return inner


def _find_block(inner: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """Return how many elements of the codes an element of the scales is for, along each axis; empty if none fits."""
    codes, scales = inner.get(_CODES), inner.get(_SCALES)
    if codes is None or scales is None or codes.ndim != scales.ndim:
        return ()
    sizes = list(codes.shape)
    if codes.dtype == torch.float4_e2m1fn_x2:
        sizes[-1] *= 2  # blocks count elements, shapes of this dtype pairs
    fits = all(size and count and not size % count for size, count in zip(sizes, scales.shape, strict=True))
    return tuple(size // count for size, count in zip(sizes, scales.shape, strict=True)) if fits else ()


def _form(key: str, tensor: Any) -> str:
    """Return the class and the dtypes as text: with others, the same bits are other values."""
    _, context = flatten_tensor(tensor)
    dtypes = {name: part.dtype for name, part in _inner(key, tensor, []).items()}
    inside = context.items() if isinstance(context, dict) else ()
    dtypes |= {name: value for name, value in inside if isinstance(value, torch.dtype) and value != tensor.dtype}
    return f"{type(tensor).__qualname__}({', '.join(f'{name}={dtype}' for name, dtype in sorted(dtypes.items()))})"


__all__ = ["is_native_factory", "native_factory"]

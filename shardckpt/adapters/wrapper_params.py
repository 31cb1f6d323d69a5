"""Quantized parameters and buffers of modules, stored bit for bit: their codes and scales, not their values.

Older checkpoints, and checkpoints of trainings that were not quantized, have values; a load quantizes these anew.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import get_local_tensor
from shardckpt.adapters.forms import FORM, describe_with_form, list_tensors
from shardckpt.adapters.leaves import describe_leaf
from shardckpt.adapters.wrappers import CLASS, flatten_wrappers, is_wrapper
from shardckpt.errors import ShardingError
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.tensors.inner import flatten_tensor, has_inner
from shardckpt.tensors.memory import ORDINARY
from shardckpt.tensors.wrappers import kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.adapters.dtensor import LayoutCache
    from shardckpt.mapping.base import ReplicaId, Replicated
    from shardckpt.mapping.unstored import StoredNames

#: Types of values of a class's context that may decide the meaning of bits, and are compared; others are not.
_FLAGS = (bool, str, int, float, torch.dtype, Enum)
#: The key, in a form, of the numbers that are extents or strides of the tensors, too; and the key of the tensor's own.
_SIZES = "shardckpt: sizes"
_OWN = "(shape, strides)"


def find_wrapper_params(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a module that are stored by the tensors inside them."""
    return {name: value for name, value in values.items() if type(value) not in ORDINARY and is_wrapper(value)}


def describe_wrapper_param(
    key: str, tensor: torch.Tensor, replicated: Replicated, cache: LayoutCache
) -> ShardedTensorFactory:
    """Return a factory of a module's tensor, by the tensors inside it, which a load fills; it resolves to ``tensor``.

    The load raises ShardingError if the stored one is of another class, or its bits mean something else.
    """

    def build(key: str, data: Any, _: ReplicaId, __: slice | None) -> dict[str, Any]:
        flat = flatten_wrappers(data)
        leaves = describe_with_form(_make_form(data), list_tensors(flat), key, replicated, cache)
        # those inside a DTensor are DTensors
        return {n: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf for n, leaf in leaves.items()}

    def merge(loaded: dict[str, Any]) -> torch.Tensor:
        saved, live = loaded[FORM], _make_form(tensor)
        if not _agree(saved, live):
            raise ShardingError(
                f"{key!r} was saved as {saved}, and loaded into {live}, whose values are now wrong: quantize the model "
                "as the saved one was before the load"
            )
        return tensor

    return ShardedTensorFactory(key, tensor, build, merge)


def _make_form(tensor: torch.Tensor, *, is_whole: bool = True) -> dict[str, Any]:
    """Return the class of a wrapper tensor, the flags that give its bits a meaning, and its inner wrappers' forms.

    ``is_whole`` is False of a tensor in a DTensor.
    """
    if isinstance(tensor, DTensor):
        return _make_form(get_local_tensor(tensor), is_whole=False)
    inner, context = flatten_tensor(tensor)
    named = context.items() if isinstance(context, dict) else enumerate(context or ())
    values = {str(name): value for name, value in named if isinstance(value, _FLAGS)}
    numbers = {name for name, value in values.items() if type(value) is int}
    # sizes depend on the number of ranks; the shapes of stored tensors are compared elsewhere
    known = {size for each in (tensor, *inner.values()) for size in (*each.shape, *each.stride(), each.numel())}
    sizes = {name: str(values[name]) for name in values if name in numbers and values[name] in known}
    return {
        CLASS: kind(tensor),
        **{name: str(value) for name, value in values.items() if name not in sizes},
        **({_SIZES: {_OWN: str((*tensor.shape, *tensor.stride())), **sizes}} if numbers and is_whole else {}),
        **{name: _make_form(each, is_whole=is_whole) for name, each in inner.items() if has_inner(each)},
    }


def _agree(saved: dict[str, Any], live: dict[str, Any]) -> bool:
    """Return whether no form contradicts the other; a number may be a size in one of them alone."""
    sizes, live_sizes = saved.get(_SIZES, {}), live.get(_SIZES, {})
    if sizes.get(_OWN) == live_sizes.get(_OWN):  # then what was dropped as a size is equal, or was none
        saved, live = {**sizes, **saved}, {**live_sizes, **live}
    pairs = [(saved[name], live[name]) for name in (saved.keys() & live.keys()) - {_SIZES}]
    return CLASS in saved.keys() & live.keys() and all(
        _agree(one, other) if isinstance(one, dict) and isinstance(other, dict) else one == other
        for one, other in pairs
    )


def request_wrapper_params(
    entries: Mapping[str, Any], params: Mapping[str, torch.Tensor], stored: StoredNames, prefix: str
) -> dict[str, Any]:
    """Return the request of a load for a module's tensors: values where the checkpoint has no tensors inside."""
    by_value = {
        name: describe_leaf(param, f"{prefix}{name}", "unchecked", detached=True)
        for name, param in params.items()
        if f"{prefix}{name}" in stored.tensors
    }
    return {**entries, **by_value}

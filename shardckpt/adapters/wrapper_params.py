"""Quantized parameters and buffers of modules, stored bit for bit: their codes and scales, not their values.

Older checkpoints, and those of trainings that were not quantized, have values; a load quantizes these anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.adapters.forms import FORM, describe_with_form, list_tensors
from shardckpt.adapters.leaves import describe_leaf
from shardckpt.adapters.wrappers import CLASS, flatten_wrappers, is_wrapper
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensorFactory
from shardckpt.tensors import INNER, ORDINARY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.adapters.dtensor import AlikeTensors
    from shardckpt.mapping import ReplicaId, Replicated, StoredNames

#: Types of those values of a class's context that say what bits mean. Sizes follow from the tensors inside.
_FLAGS = (bool, str, float, torch.dtype)


def find_wrapper_params(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return those of a module's tensors that are stored by the tensors inside them."""
    return {name: value for name, value in values.items() if type(value) not in ORDINARY and is_wrapper(value)}


def describe_wrapper_param(
    key: str, tensor: torch.Tensor, replicated: Replicated, alike: AlikeTensors
) -> ShardedTensorFactory:
    """Describe a module's tensor by the tensors inside it, which a load fills.

    Args:
        key: Its key.
        tensor: A tensor of :func:`find_wrapper_params`.
        replicated: As for :func:`describe_leaf`.
        alike: As there.

    Returns:
        A factory, which a load resolves to ``tensor``. The load raises ShardingError if the stored one is of another
        class, or its bits mean something else.
    """

    def build(key: str, data: Any, _: ReplicaId, __: slice | None) -> dict[str, Any]:
        flat = flatten_wrappers(data)
        leaves = describe_with_form(_make_form(flat), list_tensors(flat), key, replicated, alike)
        # those inside a DTensor are DTensors
        return {n: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf for n, leaf in leaves.items()}

    def merge(loaded: dict[str, Any]) -> torch.Tensor:
        saved, live = loaded[FORM], _make_form(flatten_wrappers(tensor))
        if saved != live:
            raise ShardingError(
                f"{key!r} was saved as {saved}, and loaded into {live}, whose values are now wrong: quantize the model "
                "as the saved one was before the load"
            )
        return tensor

    return ShardedTensorFactory(key, tensor, build, merge)


def _make_form(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of a flattened tensor, what says how to read its bits, and the same of those inside."""
    context = flat["context"] if isinstance(flat["context"], dict) else dict(enumerate(flat["context"] or ()))
    inside = {name: _make_form(each) for name, each in flat[INNER].items() if isinstance(each, dict)}
    flags = {str(name): str(value) for name, value in context.items() if isinstance(value, _FLAGS)}
    return {CLASS: flat[CLASS], **flags, **inside}


def request_wrapper_params(
    entries: Mapping[str, Any], params: Mapping[str, torch.Tensor], stored: StoredNames, prefix: str
) -> dict[str, Any]:
    """Return what a load asks for of a module's tensors: values where the checkpoint has no tensors inside.

    Args:
        entries: The descriptions of all of the module's tensors.
        params: Those of :func:`find_wrapper_params`.
        stored: What the checkpoint has.
        prefix: What the keys begin with.
    """
    by_value = {
        name: describe_leaf(param, f"{prefix}{name}", "unchecked", detached=True)
        for name, param in params.items()
        if f"{prefix}{name}" in stored.tensors
    }
    return {**entries, **by_value}

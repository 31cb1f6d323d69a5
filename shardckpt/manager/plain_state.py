"""States that are the same on all ranks: their tensors are stored as tensors, the rest as one object, the form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardckpt.adapters.dtensor import LayoutCache
from shardckpt.adapters.forms import is_placeholder, join_path, make_form
from shardckpt.adapters.leaves import describe_leaf, describe_object, describe_plain_object
from shardckpt.adapters.stored_values import nest
from shardckpt.state_dict import dict_list_map_outplace, list_dcp_values, nested_items, of_type

if TYPE_CHECKING:
    from shardckpt.mapping.base import Replicated, ShardedStateDict
    from shardckpt.mapping.sharded_object import PlainObject

_MOST_VALUES = 1000


def describe_form(name: str, state: Any, replicated: Replicated) -> Any:
    """Return a sharded object of a state with a placeholder for each tensor; a state of None describes a load.

    ``replicated`` is True to compare the ranks' objects in a save, ``"unchecked"`` not to.
    """
    return describe_object(make_form(state), name, replicated)


def describe_tensors(name: str, state: Any, replicated: Replicated) -> Any:
    """Return the sharded tensors of a state at their places, in dicts.

    ``replicated`` is True to compare the ranks' tensors in a save, ``"unchecked"`` not to.
    """
    tensors = {path: leaf for path, leaf in nested_items(state, (name,)) if isinstance(leaf, torch.Tensor)}
    cache = LayoutCache()
    described = {path: describe_leaf(leaf, join_path(path), replicated, cache=cache) for path, leaf in tensors.items()}
    return nest(described).get(name, {})


def describe_values(name: str, state: Any, taken: set[str]) -> dict[str, PlainObject]:
    """Describe the values of a state that are not tensors once more, one by one, as stock ``dcp.load`` asks for them.

    Their keys are the name and DCP's dotted paths. Keys in ``taken``, those of all else that is saved, are not used
    again; those of the values are added to it. A state of more than 1,000 values gets none: it would take long to store
    twice.
    """
    values = dict(list_dcp_values({name: state}))
    if len(values) > _MOST_VALUES:
        return {}
    # The values are stored in their state, too: one whose dotted path is the key of something else may go without its
    # own entry, and so may one that has the form of a key of Megatron's objects.
    free = {key: value for key, value in values.items() if key not in taken and "/shard_" not in key}
    taken.update(free)
    return {key: describe_plain_object(value, key) for key, value in free.items()}


def request_tensors(name: str, form: Any, live: Any, taken: set[int]) -> ShardedStateDict:
    """Return the tensors to load by the position of their placeholder in the form: live ones where they fit, else new.

    ``taken`` has addresses of storage (:func:`memory_of`) that something else is loaded into; those used here are
    added. Tensors that share storage now may not have shared it when they were saved.
    """
    live_leaves = dict(nested_items(live))
    return {
        str(number): _request_tensor(join_path((name, *path)), placeholder, live_leaves.get(path), taken)
        for number, (path, placeholder) in enumerate(
            (path, leaf) for path, leaf in nested_items(form) if is_placeholder(leaf)
        )
    }


def merge_tensors(form: Any, tensors: dict[str, Any]) -> Any:
    """Return the state that was saved: the stored form with the loaded tensors instead of the placeholders."""
    # Both walks go through a form in the same order, so that position n is the n-th placeholder.
    ordered = (tensors[str(number)] for number in range(len(tensors)))
    return dict_list_map_outplace(lambda leaf: next(ordered) if is_placeholder(leaf) else leaf, form)


def restore_keys(loaded: Any, live: Any) -> Any:
    """Return a state that DCP stored, with the keys and containers of the live one: DCP makes every key of a dict text.

    ``MultiStepLR.milestones`` is a Counter of integers: as a dict of text it would never match an epoch.
    """
    if isinstance(loaded, dict) and isinstance(live, dict):
        keys = {str(key): key for key in live}
        found = {keys.get(key, key): restore_keys(value, live.get(keys.get(key, key))) for key, value in loaded.items()}
        return of_type(live, found)
    if isinstance(loaded, list) and isinstance(live, list) and len(loaded) == len(live):
        return [restore_keys(*pair) for pair in zip(loaded, live, strict=True)]
    return loaded


def memory_of(value: Any) -> int | None:
    """Return the address of a tensor's storage, or of a DTensor's local one; None for other values and subclasses."""
    local = value.detach() if isinstance(value, torch.Tensor) and not is_lazy(value) else value
    local = local.to_local() if isinstance(local, DTensor) else local
    is_dense = type(local) is torch.Tensor and local.layout is torch.strided
    return local.untyped_storage().data_ptr() if is_dense else None


def _request_tensor(key: str, placeholder: tuple[Any, ...], live: Any, taken: set[int]) -> Any:
    _, dtype_name, shape = placeholder[:3]
    dtype = getattr(torch, dtype_name)
    fits = isinstance(live, torch.Tensor) and tuple(live.shape) == tuple(shape) and live.dtype == dtype
    if not fits or live.is_meta or live.layout != torch.strided:
        return describe_leaf(torch.empty(shape, dtype=dtype, device="cpu"), key, "unchecked")
    memory = memory_of(live)
    if memory in taken or not live.is_contiguous():  # of a tensor with other strides, elements may share memory
        live = torch.empty_like(live, memory_format=torch.contiguous_format)
    elif memory is not None:
        taken.add(memory)
    return describe_leaf(live, key, "unchecked")

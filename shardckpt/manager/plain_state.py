"""States that are the same on all ranks: their tensors are stored as tensors, the rest as one object, the form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters import describe_leaf, describe_object
from shardckpt.state_dict import dict_list_map_outplace, nested_items

if TYPE_CHECKING:
    from shardckpt.mapping import Replicated, ShardedStateDict

#: The first item of a placeholder, ``(this text, dtype name, shape)``, which replaces a tensor in a stored form. It is
#: part of the checkpoint format.
_PLACEHOLDER = "shardckpt: a tensor"


def describe_form(name: str, state: Any, replicated: Replicated) -> Any:
    """Describe a state without its tensors, as one object.

    Args:
        name: The key of the object.
        state: Nested dicts and lists; None to describe a load.
        replicated: True to compare the ranks' objects in a save; ``"unchecked"`` not to.

    Returns:
        A sharded object: the state with a placeholder for each tensor.
    """
    return describe_object(dict_list_map_outplace(_replace_tensor, state), name, replicated)


def describe_tensors(name: str, state: Any, replicated: Replicated) -> ShardedStateDict:
    """Describe the tensors of a state.

    Args:
        name: The first part of their keys.
        state: Nested dicts and lists.
        replicated: True to compare the ranks' tensors in a save; ``"unchecked"`` not to.

    Returns:
        Sharded tensors by the position, from ``"0"``, of their placeholder in the form.
    """
    return {
        str(number): describe_leaf(leaf, _make_key(name, path), replicated)
        for number, (path, leaf) in enumerate(_find_leaves(state, lambda leaf: isinstance(leaf, torch.Tensor)))
    }


def request_tensors(name: str, form: Any, live: Any, taken: set[int]) -> ShardedStateDict:
    """Describe the tensors to load for a stored form: the live state's where they fit, else new ones.

    Args:
        name: The first part of their keys.
        form: What was loaded for :func:`describe_form`.
        live: The state now.
        taken: Addresses of storage (:func:`memory_of`) that something else is loaded into; those used here are added.
            Tensors that share storage now may not have shared it when they were saved.

    Returns:
        Sharded tensors by the position of their placeholder in the form.
    """
    live_leaves = dict(nested_items(live))
    return {
        str(number): _request_tensor(_make_key(name, path), placeholder, live_leaves.get(path), taken)
        for number, (path, placeholder) in enumerate(_find_leaves(form, _is_placeholder))
    }


def merge_tensors(form: Any, tensors: dict[str, Any]) -> Any:
    """Return the state that was saved: the stored form with the loaded tensors instead of the placeholders.

    Args:
        form: What was loaded for :func:`describe_form`.
        tensors: What was loaded for :func:`request_tensors`.
    """
    # Both walks go through a form in the same order, so that position n is the n-th placeholder.
    ordered = (tensors[str(number)] for number in range(len(tensors)))
    return dict_list_map_outplace(lambda leaf: next(ordered) if _is_placeholder(leaf) else leaf, form)


def memory_of(value: Any) -> int | None:
    """Return the address of a tensor's storage, of a DTensor the local one's.

    Returns:
        The address; None for another value, or a tensor subclass that wraps other tensors.
    """
    local = value.detach() if isinstance(value, torch.Tensor) else value
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.untyped_storage().data_ptr() if type(local) is torch.Tensor else None


def _find_leaves(state: Any, matches: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return [(path, leaf) for path, leaf in nested_items(state) if matches(leaf)]


def _replace_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (_PLACEHOLDER, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))


def _is_placeholder(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 3 and leaf[0] == _PLACEHOLDER  # noqa: PLR2004 - text, dtype, shape


def _request_tensor(key: str, placeholder: tuple[str, str, tuple[int, ...]], live: Any, taken: set[int]) -> Any:
    _, dtype_name, shape = placeholder
    dtype = getattr(torch, dtype_name)
    fits = isinstance(live, torch.Tensor) and tuple(live.shape) == tuple(shape) and live.dtype == dtype
    if not fits or live.is_meta or live.layout != torch.strided:
        return describe_leaf(torch.empty(shape, dtype=dtype), key, "unchecked")
    return describe_leaf(_choose_destination(live, taken), key, "unchecked")


def _choose_destination(live: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Return the tensor, or a new one like it if its storage is taken or its elements may share memory."""
    memory = memory_of(live)
    if memory in taken or not live.is_contiguous():
        return torch.empty_like(live, memory_format=torch.contiguous_format)
    taken.update([] if memory is None else [memory])
    return live


def _make_key(name: str, path: tuple[Any, ...]) -> str:
    return ".".join(map(str, (name, *path)))


__all__ = ["describe_form", "describe_tensors", "memory_of", "merge_tensors", "request_tensors"]

"""States that every rank has alike, of whatever form: their tensors stored as tensors, the rest as one object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters import describe_leaf, describe_object
from shardckpt.state_dict import dict_list_map_outplace, nested_items

if TYPE_CHECKING:
    from shardckpt.mapping import Replicated, ShardedStateDict

#: Stands for a tensor in what is stored as an object; a value of this type and content is no state of anyone's.
_MARK = "shardckpt: a tensor"


def describe_form(name: str, state: Any, replicated: Replicated) -> Any:
    """All of a state but its tensors, as an object to be stored under its name."""
    return describe_object(dict_list_map_outplace(_marked, state), name, replicated)


def describe_tensors(name: str, state: Any, replicated: Replicated) -> ShardedStateDict:
    """The tensors of a state, by the numbers that they have in its form."""
    return {
        str(number): describe_leaf(leaf, _key(name, path), replicated)
        for number, (path, leaf) in enumerate(_tensors(state, lambda leaf: isinstance(leaf, torch.Tensor)))
    }


def wanted_tensors(name: str, form: Any, live: Any, taken: set[int]) -> ShardedStateDict:
    """What is to be loaded for a stored form: into the live state's tensors where they fit, else into new ones.

    Args:
        name: The state's.
        form: What was loaded for :func:`describe_form`.
        live: The state as it is now.
        taken: Memory (:func:`memory_of`) that something else is loaded into; what is filled here is added. Tensors that
            lie in the same memory now may not have done so when they were saved.
    """
    here = dict(nested_items(live))
    return {
        str(number): _wanted(_key(name, path), mark, here.get(path), taken)
        for number, (path, mark) in enumerate(_tensors(form, _is_mark))
    }


def put_together(form: Any, tensors: dict[str, Any]) -> Any:
    """The state that was saved: the stored form, with the loaded tensors in their places."""
    found = (tensors[str(number)] for number in range(len(tensors)))
    return dict_list_map_outplace(lambda leaf: next(found) if _is_mark(leaf) else leaf, form)


def memory_of(value: Any) -> int | None:
    """Where a tensor's storage begins, of a DTensor this rank's; None for what is no tensor, or wraps several."""
    local = value.detach() if isinstance(value, torch.Tensor) else value
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.untyped_storage().data_ptr() if type(local) is torch.Tensor else None


def _tensors(nest: Any, matches: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return [(path, leaf) for path, leaf in nested_items(nest) if matches(leaf)]


def _marked(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (_MARK, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))


def _is_mark(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 3 and leaf[0] == _MARK  # noqa: PLR2004 - its name, dtype and shape


def _wanted(key: str, mark: tuple[str, str, tuple[int, ...]], live: Any, taken: set[int]) -> Any:
    _, dtype_name, shape = mark
    dtype = getattr(torch, dtype_name)
    fits = isinstance(live, torch.Tensor) and tuple(live.shape) == tuple(shape) and live.dtype == dtype
    if not fits or live.is_meta or live.layout != torch.strided:
        return describe_leaf(torch.empty(shape, dtype=dtype), key, "unchecked")
    return describe_leaf(_fillable(live, taken), key, "unchecked")


def _fillable(live: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The tensor; or one like it, where some of its elements share memory with each other or with what is taken."""
    memory = memory_of(live)
    if memory in taken or not live.is_contiguous():
        return torch.empty_like(live, memory_format=torch.contiguous_format)
    taken.update([] if memory is None else [memory])
    return live


def _key(name: str, path: tuple[Any, ...]) -> str:
    return ".".join(map(str, (name, *path)))


__all__ = ["describe_form", "describe_tensors", "memory_of", "put_together", "wanted_tensors"]

"""megatron.core.dist_checkpointing.dict_utils."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.state_dict import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    diff,
    extract_matching_values,
    map_reduce,
    merge,
    nested_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TEXT_LIMIT = 30


def inspect_types(x: Any, prefix: tuple[Any, ...] = (), indent: int = 4) -> None:
    """Print the structure of nested dicts and lists, with types and shapes of the leaves."""
    inner = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else None
    if inner is None:
        print(_leaf_text(x))  # noqa: T201 - the function is for printing
        return
    print()  # noqa: T201
    for key, value in inner:
        print(f"{' ' * indent * len(prefix)}{'>' if isinstance(x, dict) else '-'} {key}: ", end="")  # noqa: T201
        inspect_types(value, (*prefix, key), indent)


def nested_items_iter(x: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ``(container, key or index, leaf)`` for every leaf of nested dicts and lists, depth first."""
    for key, value in list(x.items() if isinstance(x, dict) else enumerate(x)):
        if isinstance(value, (dict, list)):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace every leaf, in place, by ``f(leaf)``."""
    dict_list_map_inplace(f, d)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace every leaf, in place, by ``f(key, leaf)``."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"Tensor of shape {tuple(leaf.shape)}"
    text = str(leaf)
    return f"[{type(leaf)}]: {text[:_TEXT_LIMIT]}{'...' if len(text) > _TEXT_LIMIT else ''}"


__all__ = [
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "dict_map",
    "dict_map_with_key",
    "diff",
    "extract_matching_values",
    "inspect_types",
    "map_reduce",
    "merge",
    "nested_items_iter",
    "nested_values",
]

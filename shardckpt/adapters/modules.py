"""Tensors of modules by full name; torch's own API reads FSDP1 and classes that rename."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from shardckpt.adapters.dtensor import to_local
from shardckpt.adapters.module_tree import list_state_columns, read_state_dict
from shardckpt.adapters.versions import list_versions
from shardckpt.errors import ShardingError
from shardckpt.tensors.inner import flatten_tensor, has_inner
from shardckpt.tensors.memory import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.nn import Module

    from shardckpt.adapters.module_tree import StateColumns


def as_parts(model: Any) -> list[Module]:
    """Return the list of modules for a module, or for a list of pipeline stages; raise ShardingError for others."""
    parts = list(model) if isinstance(model, (list, tuple)) else [model]
    for part in parts:
        if not isinstance(part, torch.nn.Module):
            raise ShardingError(f"expected a state dict, a module or a list of modules, got a {type(part).__name__}")
    return parts


def get_model_tensors(parts: Sequence[Module]) -> dict[str, Any]:
    """Return the parameters and buffers of all modules by full name, detached, without the prefixes of wrappers.

    They share the modules' memory: DTensors and ShardedTensors as FSDP has them, plain tensors else. Different tensors
    of the same name in two modules are a ShardingError.
    """
    with torch.no_grad():
        values = read_model_tensors(parts).items()
        return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values}


def read_model_tensors(parts: Sequence[Module]) -> dict[str, Any]:
    """Return the same tensors, but the parameters and buffers themselves: detaching many takes its time."""
    return read_model(parts)[0]


def read_versions(parts: Sequence[Module]) -> list[dict[str, Any]]:
    """Return the versions of each module by name, and further metadata that hooks have added."""
    return read_model(parts, map(list_state_columns, parts))[1]


def read_model(
    parts: Sequence[Module], columns: Iterable[StateColumns | None] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the result of :func:`read_model_tensors`, and of each module the versions by name.

    ``columns`` has the results of :func:`list_state_columns` for each module, if it was called.
    """
    found = list(map(_read_part, parts, map(list_state_columns, parts) if columns is None else columns))
    return merge_sources("model part", (values for values, _ in found)), [versions for _, versions in found]


def _read_part(part: Module, columns: StateColumns | None) -> tuple[dict[str, Any], dict[str, Any]]:
    found = None if columns is None else columns.by_name()
    if columns is not None and found is not None:
        return found, columns.versions
    read = read_state_dict(part)
    if read is None:
        return get_model_state_dict(part), list_versions(part, {})
    return read.values, list_versions(part, read.metadata)


def find_buffers(values: Mapping[str, Any], parts: Sequence[Module]) -> frozenset[str]:
    """Return the names of the values of :func:`read_model_tensors` that share a buffer's memory."""
    # 0 is no address: values that are not tensors, and tensors without memory
    places = {data_address(buffer) for part in parts for buffer in part.buffers()} - {0}
    return frozenset(name for name, value in values.items() if data_address(value) in places)


def merge_sources(kind: str, sources: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of all sources of a kind by name; raise if two have different values under one name."""
    found = list(sources)
    if len(found) == 1:
        return dict(found[0])
    merged: dict[str, tuple[int, Any]] = {}
    for source, values in enumerate(found):
        for name, value in values.items():
            first, other = merged.setdefault(name, (source, value))
            if value is not other and not share_memory(other, value):  # parts may share a parameter: tied embeddings
                raise ShardingError(
                    f"{name!r} is in {kind} {first} and in {kind} {source}, with different values: names must be "
                    "unique in the model (give each part its own prefix or layer numbers)"
                )
    return {name: value for name, (_, value) in merged.items()}


def share_memory(one: Any, other: Any) -> bool:
    """Return whether both are tensors of one class with the same memory, sizes and strides, or those inside are."""
    if not isinstance(one, torch.Tensor) or type(one) is not type(other):
        return False
    here, there = to_local(one), to_local(other)
    if has_inner(here) and has_inner(there):
        inner, others = flatten_tensor(here)[0], flatten_tensor(there)[0]
        return inner.keys() == others.keys() and all(share_memory(inner[name], others[name]) for name in inner)
    return type(here) in ORDINARY and here.is_set_to(there)


def data_address(value: Any) -> int:
    """Return the address of a tensor's memory (of a DTensor, its local tensor's); 0 for any other value."""
    value = to_local(value)
    has_address = type(value) in (*ORDINARY, torch.nn.Buffer) and value.layout is torch.strided
    return value.data_ptr() if has_address else 0

"""The stored values below a name, and memory and containers for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.adapters.leaves import describe_leaf, describe_object

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.mapping.unstored import StoredNames


def find_slots(
    names: Mapping[str, Any], stored: StoredNames, key: str, *, in_common: bool = False
) -> dict[str, list[str]]:
    """Return the slots that are stored for each name: of the key ``<key>.<name>.<slot>`` the part ``<slot>``.

    Of names that begin with each other, the longest counts. ``in_common`` is as for :meth:`StoredNames.list_below`.
    """
    slots: dict[str, list[str]] = {name: [] for name in names}
    for stored_key in stored.list_below(key, in_common=in_common):
        path = stored_key[len(key) + 1 :]
        name = find_name(path, slots)
        if name is not None and len(name) < len(path):
            slots[name].append(path[len(name) + 1 :])
    return slots


def find_name(key: str, names: Collection[str]) -> str | None:
    """Return the longest of some names with which a dotted key begins; None if none does."""
    while key not in names:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return None
    return key


def allocate(stored: StoredNames, key: str, live: Any = None, param: torch.Tensor | None = None) -> torch.Tensor:
    """Return memory for a stored tensor that belongs to no parameter.

    It is laid out as ``live``, the tensor that the optimizer has there now, or as ``param``, the parameter that it was
    sharded as, if one has the stored shape; else it is a whole tensor on the CPU.
    """
    dtype, shape = stored.tensors[key]
    for like in (live, param):
        if isinstance(like, torch.Tensor) and tuple(like.shape) == shape:
            return torch.empty_like(like.detach(), dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=dtype, device="cpu")


def request_value(stored: StoredNames, key: str, live: Any = None, param: torch.Tensor | None = None) -> Any:
    """Describe a stored value of no parameter, an object or a tensor in memory of :func:`allocate`."""
    if key not in stored.tensors:
        return describe_object(None, key, "unchecked")
    return describe_leaf(allocate(stored, key, live, param), key, "unchecked")


def nest(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return nested dicts with each value at its path."""
    found: dict[Any, Any] = {}
    for (*parts, last), value in values.items():
        node = found
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return found


def restore_containers(found: Any, live: Any, depth: int = 0) -> Any:
    """Return loaded state with the keys and lists that the live state has.

    ``found`` is of nested dicts whose keys are texts: older checkpoints and DCP's do not say which was a list, nor
    which key was a number. Where the live state has nothing in the place of a dict, keys from 0 on count a list.
    """
    if not isinstance(found, dict):
        return found
    inside = live if isinstance(live, dict) else dict(enumerate(live)) if isinstance(live, list) else {}
    keys = {str(key): key for key in inside}
    restored = {
        keys.get(str(key), key): restore_containers(value, inside.get(keys.get(str(key), key)), depth + 1)
        for key, value in found.items()
    }
    if depth == 0 or (isinstance(live, dict) and live):
        return restored
    by_text = {str(key): value for key, value in restored.items()}
    numbers = [*map(str, range(len(restored)))]
    return [by_text[number] for number in numbers] if by_text.keys() == {*numbers} else restored

"""Comparing the objects and the common state of two checkpoints. Not collective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from shardckpt.huggingface import forget_structure
from shardckpt.mapping import ShardedObject

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardckpt.engine import OpenCheckpoint

#: Characters of a value that are shown.
_SHOWN = 60
_ABSENT = object()


class ObjectDifference(NamedTuple):
    """A value of an object or of the common state that two checkpoints do not have alike.

    Attributes:
        key: The object's unique key, or ``"common"``, with the places within it: ``"common['args']['lr']"``.
        kind: What differs; the first of these that does.
        first: The class and the value in the first checkpoint, cut if it is long; ``""`` if it has none.
        second: The same in the second.
    """

    key: str
    kind: Literal["only in first", "only in second", "type", "value"]
    first: str
    second: str


class ObjectReport(NamedTuple):
    """How the objects and the common state of two checkpoints differ.

    Attributes:
        equal: Number of objects, and of entries of the common state, that both have alike.
        differences: What differs, sorted by key.
    """

    equal: int = 0
    differences: tuple[ObjectDifference, ...] = ()


def diff_objects(first: OpenCheckpoint, second: OpenCheckpoint) -> ObjectReport:
    """Compare the objects and the common state of two open checkpoints.

    Values are read as every load reads them: a pickle may name only what is allowed.

    Args:
        first: One.
        second: The other.

    Raises:
        CheckpointingException: A value cannot be read, or names what is not allowed.
    """
    ones, others = _read(first), _read(second)
    equal, found = 0, []
    for name in sorted({*ones, *others}):
        differences = list(_compare(name, ones.get(name, _ABSENT), others.get(name, _ABSENT)))
        equal += not differences
        found += differences
    return ObjectReport(equal, tuple(found))


def _read(checkpoint: OpenCheckpoint) -> Mapping[str, Any]:
    """Return the values of objects by their keys, and those of the entries of the common state."""
    shards = [shard for shard in checkpoint.index() if isinstance(shard, ShardedObject)]
    values = checkpoint.values([*shards])
    common = forget_structure(checkpoint.common())  # the nesting of a file of torch.save, which its keys say as well
    found = {f"common[{key!r}]": value for key, value in common.items()}
    return found | {shard.unique_key: value for shard, value in zip(shards, values, strict=True)}


def _compare(name: str, one: Any, other: Any) -> Iterator[ObjectDifference]:
    if one is _ABSENT or other is _ABSENT:
        kind: Any = "only in second" if one is _ABSENT else "only in first"
        yield ObjectDifference(name, kind, _show(one), _show(other))
    elif type(one) is not type(other):
        yield ObjectDifference(name, "type", _show(one), _show(other))
    elif isinstance(one, dict):
        for key in {**one, **other}:
            yield from _compare(f"{name}[{key!r}]", one.get(key, _ABSENT), other.get(key, _ABSENT))
    elif isinstance(one, (list, tuple)):
        for number in range(max(len(one), len(other))):
            pair = (each[number] if number < len(each) else _ABSENT for each in (one, other))
            yield from _compare(f"{name}[{number}]", *pair)
    elif not _are_equal(one, other):
        yield ObjectDifference(name, "value", _show(one), _show(other))


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two leaves of one class are equal; as for tensors, NaN equals NaN."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _equal_bits(one, other)
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    try:
        same = one == other
        # arrays compare by their elements
        return bool(same.all() if hasattr(same, "all") else same)
    except Exception:  # noqa: BLE001 - any class may raise anything; what cannot be compared is not said to be equal
        return False


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def _show(value: Any) -> str:
    if value is _ABSENT:
        return ""
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'}"

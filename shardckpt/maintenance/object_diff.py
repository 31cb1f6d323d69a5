"""Comparing the objects and the common state of two checkpoints. Not collective."""

from __future__ import annotations

import argparse
import types
from reprlib import Repr
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.huggingface.structure import forget_structure
from shardckpt.maintenance.diff_report import ObjectDifference, ObjectReport
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.state_dict import are_equal, have_equal_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardckpt.engine.loading import OpenCheckpoint

#: Characters of a value that are shown.
_SHOWN = 60
_ABSENT = object()


def diff_objects(first: OpenCheckpoint, second: OpenCheckpoint) -> ObjectReport:
    """Compare the objects and the common state of two open checkpoints.

    What two places of one checkpoint refer to is compared once: a difference in it stands at the first of them. Values
    are read as every load reads them: a pickle may name only what is allowed.
    """
    ones, others = _read(first), _read(second)
    ones, others = _rename_objects(ones, others), _rename_objects(others, ones)
    equal, found = 0, []
    containers: dict[str, int] = {}
    # a pickle of a few bytes may have containers that hold one twice, which hold one twice, and so on
    visited: set[tuple[int, int]] = set()
    for name in sorted({*ones, *others}):
        differences = list(_compare(name, ones.get(name, _ABSENT), others.get(name, _ABSENT), visited, containers))
        equal += not differences
        found += differences
    return ObjectReport(equal, tuple(found), containers)


def _rename_objects(ones: Mapping[str, Any], others: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name an object of one shard as the common state has it, where the other checkpoint has the key there.

    A file of ``torch.save`` has no objects: what is converted to it has their values in the common state.
    """
    found = dict(ones)
    for name in ones.keys() - others.keys():
        key, single, _ = name.rpartition("/shard_0_1")
        common = f"common[{key!r}]"
        if single and name == f"{key}{single}" and common in others and common not in ones:
            found[common] = found.pop(name)
    return found


def _read(checkpoint: OpenCheckpoint) -> Mapping[str, Any]:
    """Return the values of objects by their keys, and those of the entries of the common state."""
    shards = [*map(ShardedObject.empty_from_unique_key, checkpoint.columns().objects)]
    values = checkpoint.values([*shards]) if shards else []
    common = forget_structure(checkpoint.common())  # the nesting of a file of torch.save, which its keys say as well
    found = {f"common[{key!r}]": value for key, value in common.items()}
    return found | {shard.unique_key: value for shard, value in zip(shards, values, strict=True)}


def _compare(
    name: str, one: Any, other: Any, visited: set[tuple[int, int]], containers: dict[str, int]
) -> Iterator[ObjectDifference]:
    if one is _ABSENT or other is _ABSENT:
        kind: Any = "only in second" if one is _ABSENT else "only in first"
        yield ObjectDifference(name, kind, _show(one), _show(other))
    elif type(one) is not type(other):
        yield ObjectDifference(name, "type", _show(one), _show(other))
    elif isinstance(one, (dict, list, tuple)):
        pair = id(one), id(other)  # of objects that live as long as the values of both checkpoints
        if pair not in visited:
            visited.add(pair)
            pairs = [*_pair_parts(one, other)]
            for place, part, its in pairs:
                for difference in _compare(f"{name}[{place}]", part, its, visited, containers):
                    containers[name] = len(pairs)
                    yield difference
    elif not _are_equal(one, other):
        yield ObjectDifference(name, "value", _show(one), _show(other))


def _pair_parts(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of two containers of one class, with their places."""
    if isinstance(one, dict):
        for key in {**one, **other}:
            yield f"{key!r}", one.get(key, _ABSENT), other.get(key, _ABSENT)
    else:
        for number in range(max(len(one), len(other))):
            part, its = (each[number] if number < len(each) else _ABSENT for each in (one, other))
            yield f"{number}", part, its


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two leaves of one class are equal; tensors are by their bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and have_equal_bits(one, other)
    return are_equal(one, other)


class _OuterRepr(Repr):
    """Shows the outer parts of a value: the text of all of one that a stranger has made may not end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 5
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 16
        self.maxstring = self.maxother = self.maxlong = 2 * _SHOWN

    def repr_instance(self, x: Any, level: int) -> str:
        """Return the text of a value of a class that the base does not know."""
        if isinstance(x, dict):
            return self.repr_dict(x, level)
        if isinstance(x, (argparse.Namespace, types.SimpleNamespace)):
            return self.repr_dict(vars(x), level)
        return super().repr_instance(x, level)


_REPR = _OuterRepr()


def _show(value: Any) -> str:
    if value is _ABSENT:
        return ""
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = " ".join(_REPR.repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'}"

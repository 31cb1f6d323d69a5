"""Comparing the objects and the common state of two checkpoints. Not collective."""

from __future__ import annotations

import argparse
import types
from reprlib import Repr
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.huggingface.structure import forget_structure, plain_name
from shardckpt.maintenance.diff_report import ObjectDifference, ObjectReport
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import are_equal, have_equal_bits, of_type
from shardckpt.stubs.stub import Stub

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardckpt.engine.opening import OpenCheckpoint

#: Characters of a value that are shown.
_SHOWN = 60
_ABSENT = object()
_OF_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace, Stub)
_PLAIN = (bool, int, float, str, bytes, type(None))


class _Entry(NamedTuple):
    """An object, or an entry of the common state: its key in a file of ``torch.save``, and its value."""

    key: str
    value: Any = _ABSENT


def diff_objects(
    first: OpenCheckpoint, second: OpenCheckpoint, only_first: Collection[str], only_second: Collection[str]
) -> tuple[ObjectReport, set[str]]:
    """Compare the objects and the common state of two open checkpoints.

    ``only_first`` and ``only_second`` are the tensors that one of them alone has. If the other has them in an object or
    in its common state, as a file of ``torch.save`` has its whole dict, they are compared here: the second result has
    their keys.

    A value that two places of one checkpoint refer to is compared once: a difference in it stands at the first of them.
    Values are read as every load reads them: a pickle may name only allowed globals.
    """
    ones, others = _read(first), _read(second)
    ones, others = _rename_objects(ones, others), _rename_objects(others, ones)
    known = _separate_tensors(ones, second, only_second, others) | _separate_tensors(others, first, only_first, ones)
    different_plain, unpaired_plain = _compare_plain_objects(first, second, ones, others)
    equal, found = 0, []
    containers: dict[str, int] = {}
    # a pickle of a few bytes may have containers that hold one twice, which hold one twice, and so on
    visited: set[tuple[int, int]] = set()
    for name in sorted({*ones, *others}):
        one, other = (values.get(name, _Entry("")).value for values in (ones, others))
        differences = list(_compare(name, one, other, visited, containers))
        equal += not differences
        found += differences
    return ObjectReport(equal, tuple(found), containers, different_plain, unpaired_plain), known


def _rename_objects(ones: Mapping[str, _Entry], others: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Name an object as the common state has it, where the other checkpoint has the key there.

    A file of ``torch.save`` has no objects: a conversion to it puts their values into the common state.
    """
    found = dict(ones)
    for name in ones.keys() - others.keys():
        common = f"common[{ones[name].key!r}]"
        if common in others and common not in ones:
            found[common] = found.pop(name)
    return found


def _separate_tensors(
    values: dict[str, _Entry], other: OpenCheckpoint, alone: Collection[str], theirs: dict[str, _Entry]
) -> set[str]:
    """Take tensors out of the objects of a checkpoint that the other one stores as tensors; return their keys.

    Each becomes an entry of its own in ``values`` and in ``theirs``, the values of the other, so that the two are
    compared. ``alone`` are the keys of the tensors that only the other stores.
    """
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    prefixes = _list_prefixes(alone)  # a pickle of a few bytes may have more places than can be visited, or a circle

    def pop_tensors(name: str, key: str, value: Any) -> Any:
        """Return a value without those tensors; a container of nothing else is absent, as in a file."""
        if isinstance(value, torch.Tensor) and key in alone and key not in tensors:
            tensors[key] = (name, value)
            return _ABSENT
        if not isinstance(value, (dict, list)) or key not in prefixes:
            return value
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        rest = {place: pop_tensors(f"{name}[{place!r}]", f"{key}.{place}", part) for place, part in parts.items()}
        if all(rest[place] is part for place, part in parts.items()):
            return value
        kept = {place: part for place, part in rest.items() if part is not _ABSENT}
        return of_type(value, kept if isinstance(value, dict) else [*kept.values()]) if kept else _ABSENT

    for name, (key, value) in [*values.items()] if alone else []:
        values[name] = _Entry(key, pop_tensors(name, key, value))
        if values[name].value is _ABSENT:
            del values[name]
    if not tensors:
        return set()
    columns = other.columns()
    described = dict(zip(columns.keys, zip(columns.dtypes, columns.shapes, strict=True), strict=True))
    for key, (name, tensor) in tensors.items():
        dtype, shape = described[key]
        stored = torch.empty(shape, dtype=dtype, device="meta")  # of another shape it is not read
        if (dtype, tuple(shape)) == (tensor.dtype, tuple(tensor.shape)):
            (stored,) = other.values([ShardedTensor.from_global_shape(key, dtype, shape)])
        values[name], theirs[name] = _Entry(key, tensor), _Entry(key, stored)
    return {*tensors}


def _read(checkpoint: OpenCheckpoint) -> dict[str, _Entry]:
    """Return the values of objects by their keys, and the values of the entries of the common state."""
    shards = [*map(ShardedObject.empty_from_unique_key, checkpoint.columns().objects)]
    values = checkpoint.values([*shards]) if shards else []
    common = forget_structure(checkpoint.common())  # the nesting of a file of torch.save, which its keys say as well
    found = {f"common[{key!r}]": _Entry(f"{key}", value) for key, value in common.items()}
    return found | {
        shard.unique_key: _Entry(plain_name(shard), value) for shard, value in zip(shards, values, strict=True)
    }


def _compare_plain_objects(
    first: OpenCheckpoint, second: OpenCheckpoint, ones: Mapping[str, _Entry], others: Mapping[str, _Entry]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare the PlainObjects that both have, which no load returns, each once however many keys it has.

    Return a key of each that differs, and the keys of objects that one alone has, while the other's common state lacks
    them.
    """
    keys, its_keys = {*first.list_plain_objects()}, {*second.list_plain_objects()}
    alone = _find_absent(keys - its_keys, others) | _find_absent(its_keys - keys, ones)
    if not keys & its_keys:
        return (), tuple(sorted(alone))
    found, its_found = (
        {key: shard for shard in each.read_plain_objects() for key in shard.keys or (shard.key,)}
        for each in (first, second)
    )
    pairs: dict[tuple[int, int], str] = {}
    for key in sorted(found.keys() & its_found.keys()):
        pairs.setdefault((id(found[key]), id(its_found[key])), key)
    for key in pairs.values():
        alone -= {*found[key].keys, *its_found[key].keys}  # another key of an object that both have
    different = (k for k in pairs.values() if any(_compare(k, found[k].data, its_found[k].data, set(), {})))
    return tuple(different), tuple(sorted(alone))


def _find_absent(keys: set[str], entries: Mapping[str, _Entry]) -> set[str]:
    """Return the keys that are no path in a common state, as plain DCP flattens it."""
    absent = set(keys)
    prefixes = _list_prefixes(keys)

    def visit(path: str, value: Any) -> None:
        absent.discard(path)
        if isinstance(value, (dict, list)) and path in prefixes:
            for place, part in value.items() if isinstance(value, dict) else enumerate(value):
                visit(f"{path}.{place}", part)

    for name, (key, value) in entries.items() if keys else ():
        if name.startswith("common["):
            visit(key, value)
    return absent


def _list_prefixes(keys: Collection[str]) -> set[str]:
    """Return the first names of keys, up to a dot: a walk that enters nothing else ends, whatever a pickle has made."""
    return {".".join(parts[:end]) for key in keys if (parts := key.split(".")) for end in range(1, len(parts))}


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
    elif isinstance(one, _OF_ATTRIBUTES):
        # attribute by attribute: stubs have no ==, and that of the others refuses tensors, and NaN is not equal to NaN
        if any(_compare(name, vars(one), vars(other), visited, {})):
            yield ObjectDifference(name, "value", _show(one), _show(other))
    elif not _are_equal(one, other):
        yield ObjectDifference(name, "value", _show(one), _show(other))


def _pair_parts(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of two containers of one class, with their places."""
    if isinstance(one, dict):
        ones, others = ({_identify(key): part for key, part in each.items()} for each in (one, other))
        shown = {_identify(key): key for key in (*one, *other)}
        for key in {**ones, **others}:
            yield f"{shown[key]!r}", ones.get(key, _ABSENT), others.get(key, _ABSENT)
    else:
        for number in range(max(len(one), len(other))):
            part, its = (each[number] if number < len(each) else _ABSENT for each in (one, other))
            yield f"{number}", part, its


def _identify(key: Any) -> Any:
    """Return a dict's key; a stub of an enum member or a named tuple becomes its class and plain values."""
    if isinstance(key, Stub) and all(type(arg) in _PLAIN for arg in key.args):
        return type(key), key.args, vars(key).get("name")
    return key


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

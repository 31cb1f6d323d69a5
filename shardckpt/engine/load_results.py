"""Check the values that a load strategy returns: a broken contract is an error that names the strategy and the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import PluginError
from shardckpt.mapping.base import ShardedBase
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.plugins.origin import describe_strategy
from shardckpt.strategy import StoredColumns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.mapping.base import StateDict
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.strategy import LoadStrategy


def check_values(
    strategy: LoadStrategy,
    wanted: Sequence[ShardedBase],
    values: Any,
    plugins: PluginManager,
    find_dtypes: Callable[[], Mapping[str, torch.dtype]],
) -> list[Any]:
    """Return what ``LoadStrategy.load`` returned, after a check that it fits the shards; no value is read.

    Too few or too many values, or one of another type, shape or dtype, are a PluginError that names the strategy, the
    plugin and the key. ``find_dtypes`` returns the stored dtypes by key. It is called only where a tensor has another
    than its shard.
    """
    try:
        _check_list(values, wanted)
        for shard, value in zip(wanted, values, strict=True):
            if isinstance(shard, ShardedTensor):
                if value is not None and value is shard.data:  # filled in place
                    continue
                _check_tensor(shard, value, find_dtypes)
            elif isinstance(value, ShardedBase):
                raise PluginError(f"load returned for object {_name(shard)} a {_kind(value)}: return its value")
    except PluginError as exc:
        raise PluginError(f"{describe_strategy(strategy, plugins)}: {exc}") from None
    return list(values)


def check_common(strategy: LoadStrategy, common: Any, plugins: PluginManager) -> StateDict:
    """Return what ``load_common`` returned; PluginError if it is no dict."""
    if not isinstance(common, dict):
        raise PluginError(
            f"{describe_strategy(strategy, plugins)}: load_common returned a {_kind(common)}, expected a dict, "
            "{} if there is no common state"
        )
    return common


def check_index(strategy: LoadStrategy, index: Any, plugins: PluginManager) -> list[ShardedBase]:
    """Return what ``load_index`` returned; PluginError if it is no list of ShardedTensors and ShardedObjects."""
    if isinstance(index, list):
        # by class: a large checkpoint has a million entries
        wrong = [kind for kind in {*map(type, index)} if not issubclass(kind, (ShardedTensor, ShardedObject))]
        if not wrong:
            return index
        what = f"a list with a {wrong[0].__name__}"
    else:
        what = f"a {_kind(index)}"
    raise PluginError(
        f"{describe_strategy(strategy, plugins)}: load_index returned {what}, expected a list of ShardedTensors and "
        "ShardedObjects without data"
    )


def check_columns(strategy: LoadStrategy, columns: Any, plugins: PluginManager) -> StoredColumns:
    """Return what ``list_columns`` returned; PluginError if it is no StoredColumns, or its columns differ in length."""
    if isinstance(columns, StoredColumns):
        counts = len(columns.keys), len(columns.dtypes), len(columns.shapes)
        if len(set(counts)) == 1:
            return columns
        what = "{} keys, {} dtypes and {} shapes".format(*counts)
    else:
        what = f"a {_kind(columns)}"
    raise PluginError(
        f"{describe_strategy(strategy, plugins)}: list_columns returned {what}, expected a StoredColumns with one of "
        "each for a tensor"
    )


def check_buildable(
    strategy: LoadStrategy, wanted: Sequence[ShardedObject], found: Any, plugins: PluginManager
) -> list[bool]:
    """Return what ``can_build`` returned; PluginError if it is no list with one answer for each object."""
    if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
        answers = f"{len(found)} answers" if isinstance(found, (list, tuple)) else f"a {_kind(found)}"
        raise PluginError(
            f"{describe_strategy(strategy, plugins)}: can_build returned {answers} for {len(wanted)} objects, "
            f"{_name(wanted[0])} the first: expected a list with one bool for each"
        )
    return list(found)


def _check_list(values: Any, wanted: Sequence[ShardedBase]) -> None:
    rule = "expected a list with one value for each shard, in their order"
    if not isinstance(values, (list, tuple)):
        raise PluginError(f"load returned a {_kind(values)}; {rule}")
    if len(values) < len(wanted):
        raise PluginError(
            f"load returned {len(values)} values for {len(wanted)} shards, and none for {_name(wanted[len(values)])}; "
            f"{rule}"
        )
    if len(values) > len(wanted):
        raise PluginError(f"load returned {len(values)} values for {len(wanted)} shards; {rule}")


def _check_tensor(shard: ShardedTensor, value: Any, find_dtypes: Callable[[], Mapping[str, torch.dtype]]) -> None:
    expected = f"expected shape {shard.data_shape} and {shard.dtype}"
    if not isinstance(value, torch.Tensor):
        raise PluginError(f"load returned for {_name(shard)} a {_kind(value)}, no tensor; {expected}")
    found = f"load returned for {_name(shard)} shape {tuple(value.shape)} and {value.dtype}"
    if tuple(value.shape) != shard.data_shape:
        raise PluginError(f"{found}; {expected}")
    if value.is_meta:
        raise PluginError(f"{found} on the meta device, without values; {expected} with values")
    if value.dtype == shard.dtype:
        return
    if shard.data is None:  # nothing to copy into: the caller gets this tensor
        raise PluginError(f"{found}; {expected}: cast it, or fill shard.init_data('cpu')")
    stored = find_dtypes().get(shard.key, value.dtype)
    if value.dtype != stored:
        raise PluginError(f"{found}; {expected}, or the stored {stored}, which the core casts")


def _name(shard: ShardedBase) -> str:
    return repr(shard.unique_key if isinstance(shard, ShardedObject) else shard.key)


def _kind(value: Any) -> str:
    return type(value).__name__

"""Check the values that a load strategy returns: a broken contract is an error that names the strategy and the key."""

from __future__ import annotations

from functools import cache
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
    """Return the values of ``LoadStrategy.load`` if number, types, shapes and dtypes fit the shards.

    ``find_dtypes`` returns the known stored dtypes by key. It may make a dict of all keys, so it is called once at
    most: if the dtype of a tensor is not its shard's.

    Raises:
        PluginError: The values do not fit. The error names the strategy, the plugin, and the key of a wrong value.
    """
    find_dtypes = cache(find_dtypes)
    try:
        _check_list(values, wanted)
        for shard, value in zip(wanted, values, strict=True):
            if isinstance(shard, ShardedTensor):
                if value is not None and value is shard.data:  # filled in place
                    continue
                _check_tensor(shard, value, find_dtypes)
            elif isinstance(value, ShardedBase):
                raise PluginError(f"load returned for object {_quote(shard)} a {_class_name(value)}: return its value")
    except PluginError as exc:
        raise _make_error(strategy, plugins, str(exc)) from None
    return list(values)


def check_common(strategy: LoadStrategy, common: Any, plugins: PluginManager) -> StateDict:
    """Return the common state of ``LoadStrategy.load_common``; PluginError unless it is a dict."""
    if not isinstance(common, dict):
        fault = f"load_common returned a {_class_name(common)}, expected a dict, {{}} if there is no common state"
        raise _make_error(strategy, plugins, fault)
    return common


def check_index(strategy: LoadStrategy, index: Any, plugins: PluginManager) -> list[ShardedBase]:
    """Return the index of ``LoadStrategy.load_index``; PluginError unless it is a list of shards."""
    if isinstance(index, list):
        # one check per class: a large checkpoint has a million entries
        wrong = [kind for kind in {*map(type, index)} if not issubclass(kind, (ShardedTensor, ShardedObject))]
        if not wrong:
            return index
        returned = f"a list with a {wrong[0].__name__}"
    else:
        returned = f"a {_class_name(index)}"
    fault = f"load_index returned {returned}, expected a list of ShardedTensors and ShardedObjects without data"
    raise _make_error(strategy, plugins, fault)


def check_columns(strategy: LoadStrategy, columns: Any, plugins: PluginManager) -> StoredColumns:
    """Return the columns of ``list_columns``; PluginError unless they have equal lengths, and texts as keys."""
    if isinstance(columns, StoredColumns):
        counts = len(columns.keys), len(columns.dtypes), len(columns.shapes)
        # by class, as in check_index; dtypes and shapes may be read only when they are asked for
        wrong = [kind.__name__ for kind in {*map(type, columns.keys)} if not issubclass(kind, str)]
        if len(set(counts)) == 1 and not wrong:
            return columns
        returned = f"a key of type {wrong[0]}" if wrong else "{} keys, {} dtypes and {} shapes".format(*counts)
    else:
        returned = f"a {_class_name(columns)}"
    fault = f"list_columns returned {returned}, expected StoredColumns with a text, a dtype and a shape per tensor"
    raise _make_error(strategy, plugins, fault)


def check_buildable(
    strategy: LoadStrategy, wanted: Sequence[ShardedObject], answers: Any, plugins: PluginManager
) -> list[bool]:
    """Return the answers of ``can_build`` for one or more objects; PluginError unless there is one for each."""
    if not isinstance(answers, (list, tuple)) or len(answers) != len(wanted):
        returned = f"{len(answers)} answers" if isinstance(answers, (list, tuple)) else f"a {_class_name(answers)}"
        fault = (
            f"can_build returned {returned} for {len(wanted)} objects, {_quote(wanted[0])} the first: expected a list "
            "with one bool for each"
        )
        raise _make_error(strategy, plugins, fault)
    return list(answers)


def _make_error(strategy: LoadStrategy, plugins: PluginManager, fault: str) -> PluginError:
    return PluginError(f"{describe_strategy(strategy, plugins)}: {fault}")


def _check_list(values: Any, wanted: Sequence[ShardedBase]) -> None:
    rule = "expected a list with one value for each shard, in their order"
    if not isinstance(values, (list, tuple)):
        raise PluginError(f"load returned a {_class_name(values)}; {rule}")
    if len(values) != len(wanted):
        missing = f", and none for {_quote(wanted[len(values)])}" if len(values) < len(wanted) else ""
        raise PluginError(f"load returned {len(values)} values for {len(wanted)} shards{missing}; {rule}")


def _check_tensor(shard: ShardedTensor, value: Any, find_dtypes: Callable[[], Mapping[str, torch.dtype]]) -> None:
    expected = f"expected shape {shard.data_shape} and {shard.dtype}"
    if not isinstance(value, torch.Tensor):
        raise PluginError(f"load returned for {_quote(shard)} a {_class_name(value)}, no tensor; {expected}")
    returned = f"load returned for {_quote(shard)} shape {tuple(value.shape)} and {value.dtype}"
    if tuple(value.shape) != shard.data_shape:
        raise PluginError(f"{returned}; {expected}")
    if value.is_meta:
        raise PluginError(f"{returned} on the meta device, without values; {expected} with values")
    if value.dtype == shard.dtype:
        return
    if shard.data is None:  # nothing to copy into: the caller gets this tensor
        raise PluginError(f"{returned}; {expected}: cast it, or fill shard.init_data('cpu')")
    # the copy into the shard's data may cast from the stored dtype: check_dtypes has approved that cast, and no other
    stored = find_dtypes().get(shard.key, value.dtype)  # an unknown dtype is not compared
    if value.dtype != stored:
        raise PluginError(f"{returned}; {expected}, or the stored {stored}, which the core casts")


def _quote(shard: ShardedBase) -> str:
    return repr(shard.unique_key if isinstance(shard, ShardedObject) else shard.key)


def _class_name(value: Any) -> str:
    return type(value).__name__

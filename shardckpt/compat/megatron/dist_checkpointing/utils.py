"""megatron.core.dist_checkpointing.utils."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.mapping.base import ShardedBase, ShardedStateDict, StateDict
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import KeyRenaming, LocalNonpersistentObject, OptionalEntries
from shardckpt.planning.shard_copies import shard_id
from shardckpt.quantized import is_native_factory
from shardckpt.state_dict import (
    extract_matching_values,
    extract_sharded_base,
    extract_sharded_tensors_and_factories,
    nested_values,
)
from shardckpt.tensors.wrappers import dequantize, is_quantized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardckpt.mapping.sharded_object import ShardedObject

fallback_logger = logging.getLogger(__name__)

#: Names of the blocks around the running code, and their logger: of each thread and each asyncio task its own.
_stack: ContextVar[tuple[tuple[str, ...], logging.Logger]] = ContextVar("logger_stack", default=((), fallback_logger))


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Return an iterator of tuples as ``zip`` does; it raises ValueError if lengths differ."""
    return zip(*args, strict=True)


#: Key, global offset, and start and stop of the flattened range if there is one.
_ShardId: TypeAlias = "tuple[str, tuple[int, ...], tuple[int, int] | None]"


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """Return Megatron's id of a tensor shard; ours, :func:`shardckpt.planning.shard_id`, has the shape too."""
    _, key, offset, _, flattened_range = shard_id(sharded_tensor)
    return key, offset, flattened_range


def _sharded_object_id(sharded_object: ShardedObject) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the id of an object: key, offset and shape of the grid."""
    return sharded_object.key, tuple(sharded_object.global_offset), tuple(sharded_object.global_shape)


def _clean_metadata_for_serialization(metadata: Any) -> Any:
    """Return content metadata without the process group that Megatron puts into it, which cannot be stored."""
    if not isinstance(metadata, dict):
        return metadata
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Return the nested dict of local non-persistent objects, and that of the rest."""
    return extract_matching_values(sharded_state_dict, lambda v: isinstance(v, LocalNonpersistentObject))


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Replace, in place, the quantized ``data`` of all ShardedTensors and factories by dequantized plain tensors.

    A load does not need this, and it takes the memory of a second copy of the model. Factories for the native format
    (:func:`shardckpt.quantized.native_factory`) do not change.
    """
    for leaf in nested_values(sharded_state_dict):
        holds_tensor = isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) and not is_native_factory(leaf)
        if holds_tensor and is_quantized(leaf.data):
            leaf.data = dequantize(leaf.data)


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Name a block, and set its logger.

    Args:
        name: Name of the block; None keeps the names of the blocks around it.
        current_logger: Its logger; None keeps that of the block around it.

    Yields:
        The names of this block and those around it, joined by dots, and the logger.
    """
    names, logger = _stack.get()
    if name:
        names = (*names, name)
    if current_logger:
        logger = current_logger
    token = _stack.set((names, logger))
    try:
        yield ".".join(names), logger
    finally:
        _stack.reset(token)


@contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = float("-inf"), level: int | None = None
) -> Iterator[None]:
    """Log how long a block took.

    Args:
        name: Name of the block.
        logger: The logger; None for that of the block around it.
        threshold: Shorter times, in seconds, are not logged.
        level: Level of the log entry; by default WARNING if a threshold is given, else DEBUG.
    """
    with logger_stack(name, logger) as (names, current):
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            usual = logging.DEBUG if threshold == float("-inf") else logging.WARNING
            if seconds >= threshold:
                current.log(usual if level is None else level, "%s took %.4f s", names, seconds)


def debug_msg(msg: str) -> None:
    """Log a message at level DEBUG, with the names of the blocks around it."""
    names, logger = _stack.get()
    logger.debug("%s %s", ".".join(names), msg)


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Return the nested dict of sharded tensors, and that of the rest."""
    return extract_matching_values(sharded_state_dict, lambda v: isinstance(v, ShardedTensor))


def extract_sharded_tensors_or_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Return the nested dict of sharded tensors, factories and local non-persistent objects, and that of the rest."""
    kinds = (ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)
    return extract_matching_values(sharded_state_dict, lambda v: isinstance(v, kinds))


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Prepend ``prefix`` to the key of every sharded leaf, in place."""
    _rename(sharded_state_dict, {"": prefix})


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of every sharded leaf's key, in place.

    Raises:
        ValueError: a key does not begin with ``old_prefix``; nothing is changed then.
    """
    for leaf in _sharded_leaves(sharded_state_dict):
        if not leaf.key.startswith(old_prefix):
            raise ValueError(f"cannot replace prefix {old_prefix!r} by {new_prefix!r}: key {leaf.key!r} lacks it")
    _rename(sharded_state_dict, {old_prefix: new_prefix})


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]) -> None:
    """Replace, in place, the first of the given prefixes that a sharded leaf's key begins with."""
    _rename(sharded_state_dict, prefix_map)


def _rename(sharded_state_dict: ShardedStateDict, prefixes: Mapping[str, str]) -> None:
    renaming = KeyRenaming([*prefixes.items()])
    for leaf in _sharded_leaves(sharded_state_dict):
        leaf.key = renaming.apply(leaf.key)
    # a load asks for the state of an optimizer that has none yet, and so has no leaves
    for entries in _optional_entries(sharded_state_dict):
        entries.rename(renaming)


def _sharded_leaves(sharded_state_dict: ShardedStateDict) -> list[ShardedBase]:
    leaves = (leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedBase))
    return [*{id(leaf): leaf for leaf in leaves}.values()]  # one that is there twice is renamed once


def _optional_entries(values: Any) -> Iterator[OptionalEntries]:
    if isinstance(values, OptionalEntries):
        yield values
    elif isinstance(values, (dict, list)):
        for each in values.values() if isinstance(values, dict) else values:
            yield from _optional_entries(each)


REFUSED = {
    "__LOGGER_NAME_STACK": "logger_stack() yields the names of the blocks",
    "__LOGGER_STACK": "logger_stack() yields the logger",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = [
    "_ShardId",
    "_clean_metadata_for_serialization",
    "_sharded_object_id",
    "_sharded_tensor_shard_id",
    "add_prefix_for_sharding",
    "apply_prefix_mapping",
    "debug_msg",
    "debug_time",
    "extract_nonpersistent",
    "extract_sharded_base",
    "extract_sharded_tensors",
    "extract_sharded_tensors_and_factories",
    "extract_sharded_tensors_or_nonpersistent",
    "fallback_logger",
    "force_all_tensors_to_non_fp8",
    "logger_stack",
    "replace_prefix_for_sharding",
    "zip_strict",
]

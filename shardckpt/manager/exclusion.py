"""Leaves tensors of the model out of a save or a load, by their names."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from shardckpt.errors import ask_nearest, listed
from shardckpt.mapping.base import ShardedBase
from shardckpt.mapping.unstored import OptionalEntries
from shardckpt.state_dict import build_copy, extract_matching_values, nested_values
from shardckpt.validation.keys import VERSIONS, stored_key

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import ShardedStateDict

logger = logging.getLogger(__name__)


def leave_out(
    described: ShardedStateDict, names: Collection[str], stored: Collection[str] = ()
) -> tuple[ShardedStateDict, bool]:
    """Return the state dict without the shards with these names, and whether there were any.

    ``names`` are keys, or their ends after a dot; shards under a name in ``stored`` are kept nevertheless. The given
    dict does not change.
    """
    if not names:
        return described, False
    ends = tuple(f".{name}" for name in names)

    def is_left_out(leaf: Any) -> bool:
        return isinstance(leaf, ShardedBase) and f".{leaf.key}".endswith(ends) and not _is_stored(leaf, stored)

    # a load asks for those of their entries that the checkpoint has
    if isinstance(described, OptionalEntries):
        names = [name for name, entry in described.items() if any(map(is_left_out, nested_values(entry)))]
        return described.without(names), bool(names)
    kept = {name: described[name] for name in (VERSIONS,) if name in described}
    found, rest = extract_matching_values(described, is_left_out)
    return rest | kept, bool(found)


def warn_of_absent(described: ShardedStateDict, names: Collection[str], comm: Comm) -> None:
    """Collective: warn on the main rank of names that no rank has a tensor for: nothing is left out by them."""
    are_found = comm.largest(*(leave_out(described, [name])[1] for name in names))
    absent = [name for name, is_found in zip(names, are_found, strict=True) if not is_found]
    if absent and comm.is_main:
        keys = [leaf.key for leaf in nested_values(described) if isinstance(leaf, ShardedBase)]
        ends = {*keys, *(key.rpartition(".")[2] for key in keys)}
        logger.warning(
            "exclude_from_last_save: no tensor of the model has this name, or a name that ends with it after a dot: %s",
            listed([f"{name!r} {ask_nearest(name, ends)}".rstrip() for name in absent]),
        )


def _is_stored(leaf: ShardedBase, stored: Collection[str]) -> bool:
    """Return whether a shard, or one that it is built of, as of a quantized tensor's codes, is among the stored."""
    shards = [leaf, *nested_values(build_copy(leaf))] if stored else []
    return any(isinstance(shard, ShardedBase) and stored_key(shard) in stored for shard in shards)

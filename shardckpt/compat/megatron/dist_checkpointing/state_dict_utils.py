"""megatron.core.dist_checkpointing.state_dict_utils."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.compat.megatron.dist_checkpointing.utils import extract_nonpersistent
from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.distributed.comm import Comm
from shardckpt.mapping.base import ShardedStateDict, StateDict  # noqa: TC001 - the module that this stands for has these names
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject
from shardckpt.state_dict import (
    build_copy,
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
    split_for_save,
)
from shardckpt.validation.keys import compare_common
from shardckpt.validation.sharding import validate_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.mapping.base import CommonStateDict


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], CommonStateDict] | None = None,
) -> tuple[ShardedStateDict, CommonStateDict]:
    """Split a state dict into the shards and the common state that a save would write.

    Collective if ``validate_access_integrity`` is True.

    Args:
        sharded_state_dict: As for ``save``; it does not change.
        validate_access_integrity: Whether to check shards and common state across all ranks.
        preprocess_common_before_consistancy_check: As for ``save``.

    Returns:
        The shards, with factories built, and the common state, each with the structure of the state dict.
    """
    sharded, common = split_for_save(sharded_state_dict)
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        comm = Comm()
        validate_shards(list(nested_values(sharded)), comm, state=sharded)
        compare_common(common, preprocess_common_before_consistancy_check, comm)
    return sharded, common


def load_preprocess(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict, StateDict]:
    """Split a state dict for a load: ``(requested shards, local values, factories)``.

    Args:
        sharded_state_dict: As for ``load``; it does not change.

    Returns:
        The state dict with factories built and without local objects; the values of the local objects; and the
        factories, with lists as dicts from index to value, as :func:`apply_factory_merges` takes them.
    """
    requested = filter_out_empty_flatten_tensor(sharded_state_dict)
    factories, _ = extract_matching_values(
        requested, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    local, rest = extract_nonpersistent(dict_list_map_outplace(build_copy, requested))
    return rest, dict_list_map_outplace(LocalNonpersistentObject.unwrap, local), factories


def filter_out_empty_flatten_tensor(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return the state dict without flattened shards that hold no element; the argument does not change."""

    def is_empty(leaf: Any) -> bool:
        part = leaf.flattened_range if isinstance(leaf, ShardedTensor) else None
        return part is not None and part.start == part.stop

    return extract_matching_values(sharded_state_dict, is_empty)[1]  # type: ignore[no-any-return]


__getattr__ = make_refusing_getattr(__name__)

__all__ = ["filter_out_empty_flatten_tensor", "load_preprocess", "save_preprocess"]

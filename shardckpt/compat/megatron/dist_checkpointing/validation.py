"""megatron.core.dist_checkpointing.validation."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt.compat.megatron.defaults import StrategyAction, get_default_strategy
from shardckpt.compat.megatron.dist_checkpointing.serialization import (
    check_common_strategy,
    get_default_load_sharded_strategy,
)
from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.compat.megatron.strategies import callable_with_path
from shardckpt.distributed.comm import Comm
from shardckpt.engine.integrity import save_integrity_manifest, verify_integrity_manifest
from shardckpt.engine.locations import locate
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.manifest.names import INTEGRITY_NAME as INTEGRITY_FNAME
from shardckpt.mapping.base import ShardedBase
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import read_manifest
from shardckpt.state_dict import extract_matching_values, nested_values
from shardckpt.validation.keys import (
    KeyMismatch,
    StrictHandling,
    compare_common,
    compare_keys,
    describe_mismatch,
    name_keys,
    parse_strict_flag,
    stored_key,
)
from shardckpt.validation.sharding import validate_shards_by_rank

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.mapping.base import CommonStateDict, ShardedStateDict

logger = logging.getLogger(__name__)

_LocalMetadata: TypeAlias = list[ShardedBase]
_GlobalMetadata: TypeAlias = list[_LocalMetadata]

_CHECKED = "validate_sharding_integrity(global_metadata, common_state_dict) makes all checks across ranks"

REFUSED = {
    "_compute_shards_access": _CHECKED,
    "_determine_missing_and_unexpected_keys": "validate_integrity_and_strict_load with RETURN_ALL returns the keys",
    "_validate_common_state_dict": _CHECKED,
    "_validate_objects_for_key": _CHECKED,
    "_validate_sharding_for_key": _CHECKED,
    "validate_sharded_objects_handling": "every strategy here stores objects: leave the call out",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)


def verify_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Raise :class:`~shardckpt.errors.CannotLoadError` if there is no complete checkpoint."""
    read_manifest(locate(checkpoint_dir, get_plugin_manager()), get_plugin_manager())


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: Any = None, common_strategy: Any = None
) -> tuple[Any, Any]:
    """Return the strategy that loads a checkpoint, after a check that it reads the checkpoint's format.

    Args:
        checkpoint_dir: The checkpoint.
        sharded_strategy: A strategy, or ``(backend, version)``; by default, the one that the checkpoint names.
        common_strategy: None, or Megatron's default: the sharded strategy loads the common state.

    Returns:
        The strategy twice: for shards and for the common state.

    Raises:
        StrategyMismatchError: the given strategy does not read the checkpoint.
    """
    check_common_strategy(common_strategy)
    manifest = read_manifest(locate(checkpoint_dir, get_plugin_manager()), get_plugin_manager())
    if sharded_strategy is None:
        strategy = get_default_load_sharded_strategy(checkpoint_dir)
    elif isinstance(sharded_strategy, tuple):
        strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *sharded_strategy)
    else:
        strategy = callable_with_path(sharded_strategy)
    # the caller's strategy may not be the one that the checkpoint names
    strategy.check_backend_compatibility(manifest.backend)
    strategy.check_version_compatibility(manifest.version)
    return strategy, strategy


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: ProcessGroup | None = None
) -> tuple[list[ShardedBase], list[list[ShardedBase]]]:
    """Collective: gather the shards of all ranks, without data.

    Args:
        sharded_state_dict: Nested dicts and lists with ShardedTensors and ShardedObjects; other leaves are ignored.
        process_group: The ranks; by default all.

    Returns:
        This rank's shards, and the shards of all ranks, by rank.
    """
    comm = Comm(process_group)
    with comm.local_phase("describing shards"):
        mine = [leaf.without_data() for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedBase)]
    return mine, comm.all_gather(mine)


def validate_sharding_integrity(
    global_metadata: Sequence[Sequence[ShardedBase]], common_state_dict: CommonStateDict | None = None
) -> None:
    """Collective: check that the shards of all ranks fit together.

    Args:
        global_metadata: The shards of all ranks, by rank: the second result of :func:`determine_global_metadata`.
        common_state_dict: If given, all ranks of the default group compare theirs, and differences are logged.

    Raises:
        ShardingError: shards that disagree on dtype or global shape, overlap, or leave a hole.
    """
    comm = Comm()
    with comm.collective_phase("checking the shards of all ranks"):
        validate_shards_by_rank(global_metadata)
    if common_state_dict is not None:
        compare_common(common_state_dict, None, comm)


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: Sequence[ShardedBase] | None = None,
    global_metadata: Sequence[Sequence[ShardedBase]] | None = None,
    ckpt_sharded_metadata: Mapping[str, ShardedBase] | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Collective: apply a strictness mode to the requested shards, on all ranks of the default group.

    Args:
        sharded_state_dict: Nested dicts and lists with the requested shards.
        strict: The treatment of keys that do not match.
        validate_access_integrity: Whether to check also that the shards of all ranks fit together.
        local_metadata: This rank's shards, if they are listed already.
        global_metadata: The shards of all ranks, by rank; needed for that check.
        ckpt_sharded_metadata: The stored shards; needed for every mode except ``assume_ok_unexpected``.

    Returns:
        The requested shards that are stored, and the missing and unexpected keys as Megatron defines them.

    Raises:
        KeyMismatchError: keys of a rank do not match, and the mode forbids it.
    """
    mismatch = KeyMismatch()
    if strict is not StrictHandling.ASSUME_OK_UNEXPECTED:
        if ckpt_sharded_metadata is None:
            raise CheckpointingException(f"strict={strict.value!r} needs ckpt_sharded_metadata")
        requested = list(nested_values(sharded_state_dict) if local_metadata is None else local_metadata)
        mismatch = compare_keys(requested, name_keys(ckpt_sharded_metadata.values()), strict, Comm())
    if validate_access_integrity:
        if global_metadata is None:
            raise CheckpointingException("validate_access_integrity=True needs global_metadata")
        validate_sharding_integrity(global_metadata)
    kept = adjust_non_strict_load(sharded_state_dict, mismatch.absent)
    # Megatron reports nothing in this mode, though the unexpected keys are left out
    if strict is StrictHandling.IGNORE_ALL:
        return kept, set(), set()
    return kept, set(mismatch.missing), set(mismatch.unexpected)


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: Collection[str]
) -> ShardedStateDict:
    """Return the nested state dict without the shards of the given keys; the argument does not change.

    Args:
        sharded_state_dict: Nested dicts and lists with shards.
        sharded_keys_to_remove: Keys of tensors; keys or unique keys of objects.
    """
    removed = frozenset(sharded_keys_to_remove)

    def is_removed(leaf: Any) -> bool:
        return isinstance(leaf, ShardedBase) and not removed.isdisjoint((leaf.key, stored_key(leaf)))

    return extract_matching_values(sharded_state_dict, is_removed)[1]  # type: ignore[no-any-return]


def maybe_report_missing_and_unexpected_keys(
    missing_keys: Collection[str], unexpected_keys: Collection[str], raise_error: bool = True
) -> None:
    """Raise or log if there are keys that do not match (missing and unexpected as Megatron defines them)."""
    if not missing_keys and not unexpected_keys:
        return
    text = describe_mismatch(missing_keys, unexpected_keys)
    if raise_error:
        raise KeyMismatchError(text)
    logger.warning("%s", text)


__all__ = [
    "INTEGRITY_FNAME",
    "StrictHandling",
    "_GlobalMetadata",
    "_LocalMetadata",
    "adjust_non_strict_load",
    "determine_global_metadata",
    "maybe_report_missing_and_unexpected_keys",
    "parse_strict_flag",
    "save_integrity_manifest",
    "validate_integrity_and_strict_load",
    "validate_sharding_integrity",
    "verify_checkpoint",
    "verify_checkpoint_and_load_strategy",
    "verify_integrity_manifest",
]

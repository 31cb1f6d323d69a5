"""megatron.core.dist_checkpointing.validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.compat.megatron.defaults import StrategyAction, callable_with_path, get_default_strategy
from shardckpt.compat.megatron.dist_checkpointing.serialization import (
    check_common_strategy,
    get_default_load_sharded_strategy,
)
from shardckpt.compat.megatron.refusals import refusing
from shardckpt.gate import read_manifest
from shardckpt.integrity import save_integrity_manifest, verify_integrity_manifest
from shardckpt.locations import locate
from shardckpt.manifest import INTEGRITY_NAME as INTEGRITY_FNAME
from shardckpt.plugins import host
from shardckpt.validation import (
    StrictHandling,
    adjust_non_strict_load,
    determine_global_metadata,
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
)

if TYPE_CHECKING:
    import os

#: What to do instead of Megatron's names that are not here.
REFUSED = {"validate_sharded_objects_handling": "every strategy here stores objects: leave the call out"}

__getattr__ = refusing(__name__, REFUSED)


def verify_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Raise :class:`~shardckpt.errors.CannotLoadError` if there is no whole checkpoint."""
    read_manifest(locate(checkpoint_dir, host()), host())


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: Any = None, common_strategy: Any = None
) -> tuple[Any, Any]:
    """The strategy that loads the checkpoint, checked against it, twice: it loads the common state too.

    Raises:
        StrategyMismatchError: the given strategy does not read the checkpoint.
    """
    check_common_strategy(common_strategy)
    manifest = read_manifest(locate(checkpoint_dir, host()), host())
    if sharded_strategy is None:
        strategy = get_default_load_sharded_strategy(checkpoint_dir)
    elif isinstance(sharded_strategy, tuple):
        strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *sharded_strategy)
    else:
        strategy = callable_with_path(sharded_strategy)
    strategy.check_backend_compatibility(manifest.backend)
    strategy.check_version_compatibility(manifest.version)
    return strategy, strategy


__all__ = [
    "INTEGRITY_FNAME",
    "StrictHandling",
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

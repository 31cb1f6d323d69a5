"""megatron.core.dist_checkpointing.serialization: our front door with the arguments of every release."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt import dist_checkpointing
from shardckpt.compat.megatron.by_path import LoadsByPath
from shardckpt.compat.megatron.defaults import StrategyAction, callable_with_path, get_default_strategy
from shardckpt.compat.megatron.dist_checkpointing.utils import _clean_metadata_for_serialization
from shardckpt.compat.megatron.refusals import refusing
from shardckpt.dist_checkpointing import (
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from shardckpt.distributed import Comm
from shardckpt.engine import locate
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedBase
from shardckpt.plugins import host
from shardckpt.storage import is_free

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from shardckpt.background import AsyncRequest
    from shardckpt.mapping import ShardedStateDict

    PathLike = str | os.PathLike[str]

logger = logging.getLogger(__name__)

CkptShardedMetadata: TypeAlias = dict[str, ShardedBase]

#: Arguments after the strategy, by position. Until 0.18 ``common_strategy`` came before them.
_OF_SAVE = (
    "validate_access_integrity",
    "async_sharded_save",
    "preprocess_common_before_consistancy_check",
    "content_metadata",
    "async_strategy",
    "verify_integrity",
)
_OF_LOAD = ("validate_access_integrity", "strict", "verify_integrity", "process_group")

#: What to do instead of Megatron's names that are not here.
REFUSED = {"get_default_save_common_strategy": "the sharded strategy saves the common state: leave common_strategy out"}

__getattr__ = refusing(__name__, REFUSED)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: Any = None,
    *args: Any,
    **keywords: Any,
) -> AsyncRequest | None:
    """As :func:`shardckpt.dist_checkpointing.save`; what is there is replaced in one step, with a warning.

    Args:
        sharded_state_dict: As there.
        checkpoint_dir: As there.
        sharded_strategy: As there.
        *args: By position as in the last releases; or as until 0.18, with ``common_strategy`` first.
        **keywords: Of any release, and of ours.
    """
    given = _by_name("save", args, _OF_SAVE, keywords)
    check_common_strategy(given.pop("common_strategy", None))
    if "content_metadata" in given:
        given["content_metadata"] = _clean_metadata_for_serialization(given["content_metadata"])
    _warn_of_overwrite(checkpoint_dir, given.get("process_group"))
    given.setdefault("overwrite", True)
    return dist_checkpointing.save(sharded_state_dict, checkpoint_dir, sharded_strategy, **given)


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: Any = None,
    *args: Any,
    **keywords: Any,
) -> Any:
    """As :func:`shardckpt.dist_checkpointing.load`.

    Args:
        sharded_state_dict: As there.
        checkpoint_dir: As there.
        sharded_strategy: As there.
        *args: By position as in the last releases; or as until 0.18, with ``common_strategy`` first.
        **keywords: Of any release, and of ours.
    """
    given = _by_name("load", args, _OF_LOAD, keywords)
    check_common_strategy(given.pop("common_strategy", None))
    return dist_checkpointing.load(sharded_state_dict, checkpoint_dir, sharded_strategy, **given)


def load_sharded_metadata(
    checkpoint_dir: PathLike, sharded_strategy: Any = None, common_strategy: Any = None
) -> CkptShardedMetadata:
    """As :func:`shardckpt.dist_checkpointing.load_sharded_metadata`."""
    check_common_strategy(common_strategy)
    return dist_checkpointing.load_sharded_metadata(checkpoint_dir, sharded_strategy)


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> Any:
    """The strategy that saves this format."""
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: PathLike | None = None) -> Any:
    """The strategy that loads a checkpoint; without one, that of (torch_dist, 1)."""
    if checkpoint_dir is None:
        return get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
    return callable_with_path(dist_checkpointing.get_default_load_sharded_strategy(checkpoint_dir))


def check_common_strategy(strategy: Any) -> None:
    """Raise for a strategy of the common state other than the one there is: the sharded strategy stores it."""
    if strategy not in (None, ("torch", 1)) and not isinstance(strategy, LoadsByPath):
        raise CheckpointingException(
            f"common_strategy={strategy!r}: the sharded strategy stores and loads the common state too; leave it out"
        )


def _by_name(function: str, args: Sequence[Any], order: Sequence[str], keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names."""
    names = order if not args or isinstance(args[0], bool) else ("common_strategy", *order)
    positional = dict(zip(names, args, strict=False))
    if len(args) > len(names) or positional.keys() & keywords.keys():
        raise TypeError(f"{function}() got too many arguments, or one twice: {list(names)} and {sorted(keywords)}")
    return {**positional, **keywords}


def _warn_of_overwrite(checkpoint_dir: PathLike, process_group: Any) -> None:
    comm = Comm(process_group)
    with comm.collective_phase("looking at the target"):
        taken = comm.is_main and not is_free(locate(checkpoint_dir, host()))
    if taken:
        logger.warning("%s is not empty: the checkpoint there is replaced when this save is whole", checkpoint_dir)


__all__ = [
    "CkptShardedMetadata",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

"""megatron.core.dist_checkpointing.serialization: save and load with the arguments of every release of Megatron."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from shardckpt import dist_checkpointing
from shardckpt.commit.commit import is_free
from shardckpt.compat.megatron.base_classes import LoadShardedStrategy
from shardckpt.compat.megatron.defaults import StrategyAction, get_default_strategy
from shardckpt.compat.megatron.dist_checkpointing.utils import _clean_metadata_for_serialization
from shardckpt.compat.megatron.path_adapter import adapt_loader, adapt_saver
from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.compat.megatron.strategies import callable_with_path
from shardckpt.dist_checkpointing import (
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    remove_sharded_tensors,
)
from shardckpt.distributed.comm import Comm
from shardckpt.engine.locations import locate
from shardckpt.errors import CheckpointingException
from shardckpt.manifest.names import MARKERS
from shardckpt.mapping.base import ShardedBase
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.filesystem import is_there

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from shardckpt.background.request import AsyncRequest
    from shardckpt.mapping.base import ShardedStateDict
    from shardckpt.mapping.sharded_tensor import ShardedTensor

    PathLike = str | os.PathLike[str]

logger = logging.getLogger(__name__)

CkptShardedMetadata: TypeAlias = dict[str, ShardedBase]

_CONTENT_METADATA_KEY = "content_metadata"

#: Positional arguments after the strategy. Until 0.18, ``common_strategy`` came before them.
_SAVE_ARGUMENTS = (
    "validate_access_integrity",
    "async_sharded_save",
    "preprocess_common_before_consistancy_check",
    "content_metadata",
    "async_strategy",
    "verify_integrity",
)
_LOAD_ARGUMENTS = ("validate_access_integrity", "strict", "verify_integrity", "process_group")

REFUSED = {"get_default_save_common_strategy": "the sharded strategy saves the common state: leave common_strategy out"}

__getattr__ = make_refusing_getattr(__name__, REFUSED)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: Any = None,
    *args: Any,
    **keywords: Any,
) -> AsyncRequest | None:
    """Collective: save as :func:`shardckpt.dist_checkpointing.save`, replacing an existing checkpoint with a warning.

    Args:
        sharded_state_dict: As for ours.
        checkpoint_dir: As for ours.
        sharded_strategy: As for ours.
        *args: Positional arguments of the latest releases; or of releases until 0.18, with ``common_strategy`` first.
        **keywords: Keyword arguments of any release, or of ours.

    Returns:
        With ``async_sharded_save=True``, the request for an AsyncCallsQueue; else None.
    """
    given = _bind("save", args, _SAVE_ARGUMENTS, keywords)
    check_common_strategy(given.pop("common_strategy", None))
    if "content_metadata" in given:
        given["content_metadata"] = _clean_metadata_for_serialization(given["content_metadata"])
    _warn_of_overwrite(checkpoint_dir, given.get("process_group"))
    given.setdefault("overwrite", True)
    saver = adapt_saver(sharded_strategy)
    request: AsyncRequest | None = dist_checkpointing.save(sharded_state_dict, checkpoint_dir, saver, **given)
    return request


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: Any = None,
    *args: Any,
    **keywords: Any,
) -> Any:
    """Collective: load as :func:`shardckpt.dist_checkpointing.load`.

    Args:
        sharded_state_dict: As for ours.
        checkpoint_dir: As for ours.
        sharded_strategy: As for ours.
        *args: Positional arguments of the latest releases; or of releases until 0.18, with ``common_strategy`` first.
        **keywords: Keyword arguments of any release, or of ours.

    Returns:
        As ours: the state dict with tensors and objects for shards, and the common state.
    """
    given = _bind("load", args, _LOAD_ARGUMENTS, keywords)
    # the library that saved: one reader reads the checkpoints of any
    given.pop("async_strategy", None)
    check_common_strategy(given.pop("common_strategy", None))
    return dist_checkpointing.load(sharded_state_dict, checkpoint_dir, adapt_loader(sharded_strategy), **given)


def load_sharded_metadata(
    checkpoint_dir: PathLike, sharded_strategy: Any = None, common_strategy: Any = None
) -> CkptShardedMetadata:
    """Return all stored shards by key, without data: :func:`shardckpt.dist_checkpointing.load_sharded_metadata`."""
    check_common_strategy(common_strategy)
    return dist_checkpointing.load_sharded_metadata(checkpoint_dir, adapt_loader(sharded_strategy))


def load_tensors_metadata(checkpoint_dir: PathLike, sharded_strategy: Any = None) -> dict[str, ShardedTensor]:
    """Return stored tensors by key, without data: :func:`shardckpt.dist_checkpointing.load_tensors_metadata`."""
    return dist_checkpointing.load_tensors_metadata(checkpoint_dir, adapt_loader(sharded_strategy))


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> Any:
    """Return the strategy that saves a format; it can be called with a path."""
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: PathLike | None = None) -> Any:
    """Return the strategy that loads a checkpoint, or (torch_dist, 1) without one; it can be called with a path."""
    if checkpoint_dir is None:
        return get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
    return callable_with_path(dist_checkpointing.get_default_load_sharded_strategy(checkpoint_dir))


def check_common_strategy(strategy: Any) -> None:
    """Raise for any ``common_strategy`` other than Megatron's default: the sharded strategy stores the common state."""
    if strategy not in (None, ("torch", 1)) and not isinstance(strategy, LoadShardedStrategy):
        raise CheckpointingException(
            f"common_strategy={strategy!r}: the sharded strategy stores and loads the common state too; leave it out"
        )


def _bind(function: str, args: Sequence[Any], order: Sequence[str], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments after the strategy by name."""
    # until 0.18 common_strategy came first; since then it is validate_access_integrity, a boolean
    names = order if not args or isinstance(args[0], bool) else ("common_strategy", *order)
    positional = dict(zip(names, args, strict=False))
    if len(args) > len(names) or positional.keys() & keywords.keys():
        raise TypeError(f"{function}() got too many arguments, or one twice: {list(names)} and {sorted(keywords)}")
    return {**positional, **keywords}


def _warn_of_overwrite(checkpoint_dir: PathLike, process_group: Any) -> None:
    """Collective: warn on the main rank if the target is not empty."""
    comm = Comm(process_group)
    with comm.collective_phase("checking the target"):
        # one rank looks: a shared file system need not answer all of them
        target = locate(checkpoint_dir, get_plugin_manager())
        taken = comm.is_main and not is_free(target)
        has_checkpoint = taken and any(is_there(target / name) for name in MARKERS)
    if taken:
        what = (
            "will replace the checkpoint there when it commits"
            if has_checkpoint
            else "will be written next to other files, which belong to no checkpoint and stay"
        )
        logger.warning("%s is not empty: this save %s", checkpoint_dir, what)


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

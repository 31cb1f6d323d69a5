"""megatron.core.dist_checkpointing.strategies.torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
from shardckpt.compat.megatron.defaults import register_built_in_strategies as register_default_torch_strategies
from shardckpt.compat.megatron.planners import MCoreLoadPlanner, MCoreSavePlanner
from shardckpt.compat.megatron.refusals import QUEUE, make_refusing_getattr
from shardckpt.compat.megatron.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from shardckpt.compat.megatron.torch_shards import (
    MCoreMetadata,
    MCoreSavePlan,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    flatten_state_dict,
    mcore_to_pyt_state_dict,
    sharded_tensor_to_torch_sharded_tensor,
)
from shardckpt.errors import CheckpointingException, check_choice
from shardckpt_torch_dist import CheckpointStorageReader

if TYPE_CHECKING:
    import os

MSC_PREFIX = "msc://"
_metadata_fn = ".metadata"

logger = logging.getLogger(__name__)

#: Libraries that Megatron's callers choose among for background saves. Here one engine serves both purposes.
_ASYNC_STRATEGIES = ("mcore", "nvrx")


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the classes for background saves, whichever library is asked for.

    Args:
        async_strategy: ``"nvrx"`` or ``"mcore"``.
        module: The name of the one class that the caller wants; by default all.

    Returns:
        ``"mcore"``, and our classes by name.

    Raises:
        CheckpointingException: there is no such library or class.
    """
    check_choice("async_strategy", async_strategy, _ASYNC_STRATEGIES)
    classes: dict[str, Any] = {"AsyncCallsQueue": AsyncCallsQueue, "AsyncRequest": AsyncRequest}
    if module is not None and module not in classes:
        raise CheckpointingException(f"get_async_strategy has {', '.join(classes)}, not {module!r}: {QUEUE}")
    return "mcore", classes if module is None else {module: classes[module]}


def _get_filesystem_reader(
    checkpoint_dir: str | os.PathLike[str],
    cache_metadata: bool = False,  # noqa: ARG001 - a reader reads the metadata once, and never a stale one
) -> CheckpointStorageReader:
    """Return a reader for ``dcp.load``, which checks digests and runs no pickled code; of a directory or a URL."""
    return CheckpointStorageReader(checkpoint_dir)


REFUSED = {
    "get_reformulation_metadata": "flattened shards are loaded at their true shapes by dist_checkpointing.load",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = [
    "MSC_PREFIX",
    "MCoreLoadPlanner",
    "MCoreMetadata",
    "MCoreSavePlan",
    "MCoreSavePlanner",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "_get_filesystem_reader",
    "_metadata_fn",
    "_replace_sharded_keys_with_state_dict_keys",
    "_replace_state_dict_keys_with_sharded_keys",
    "_restore_dict_types",
    "_unwrap_pyt_sharded_tensor",
    "flatten_state_dict",
    "get_async_strategy",
    "mcore_to_pyt_state_dict",
    "register_default_torch_strategies",
    "sharded_tensor_to_torch_sharded_tensor",
]

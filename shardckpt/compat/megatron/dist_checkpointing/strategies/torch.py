"""megatron.core.dist_checkpointing.strategies.torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.compat.megatron.defaults import register_built_in_strategies as register_default_torch_strategies
from shardckpt.compat.megatron.refusals import LOAD_PLANNER, SAVE_PLANNER, make_refusing_getattr
from shardckpt.compat.megatron.torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from shardckpt.state_dict import nested_items

if TYPE_CHECKING:
    from shardckpt.mapping import ShardedStateDict

MSC_PREFIX = "msc://"


def flatten_state_dict(
    state_dict: ShardedStateDict,
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Flatten nested dicts and lists.

    Returns:
        The leaves by path, joined by dots; and the path of each as a tuple.
    """
    paths = {".".join(map(str, path)): path for path, _ in nested_items(state_dict)}
    return dict(zip(paths, (leaf for _, leaf in nested_items(state_dict)), strict=True)), paths


#: What to do instead of Megatron's names that are not here.
REFUSED = {
    "MCoreLoadPlanner": LOAD_PLANNER,
    "MCoreMetadata": "it is there for old pickles, which are read here without it",
    "MCoreSavePlan": "it is there for old pickles, which are read here without it",
    "MCoreSavePlanner": SAVE_PLANNER,
    "get_async_strategy": "there is only one: import AsyncRequest and AsyncCallsQueue from strategies.async_utils",
    "get_reformulation_metadata": "flattened shards are loaded at their true shapes by dist_checkpointing.load",
    "mcore_to_pyt_state_dict": SAVE_PLANNER,
    "sharded_tensor_to_torch_sharded_tensor": SAVE_PLANNER,
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = [
    "MSC_PREFIX",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "flatten_state_dict",
    "register_default_torch_strategies",
]

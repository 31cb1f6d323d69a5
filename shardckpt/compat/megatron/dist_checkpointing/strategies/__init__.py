"""megatron.core.dist_checkpointing.strategies."""

from __future__ import annotations

import importlib
from typing import Any

from shardckpt.compat.megatron.defaults import register_built_in_strategies as register_default_common_strategies
from shardckpt.compat.megatron.refusals import make_refusing_getattr

#: Modules that Megatron's callers reach as attributes.
_MODULES = (
    "async_utils",
    "base",
    "cached_metadata_filesystem_reader",
    "checkpointable",
    "common",
    "filesystem_async",
    "fully_parallel",
    "state_dict_saver",
    "torch",
)

#: What to do instead of Megatron's names that are not here.
REFUSED = {
    "nvrx": "nvidia-resiliency-ext is not needed: async_sharded_save=True and strategies.async_utils do it",
    "resharding": "flattened shards of Megatron 0.6 to 0.15 are loaded at their true shapes by dist_checkpointing.load",
    "tensorstore": "zarr checkpoints are not read here: load them with Megatron 0.15 and save them as torch_dist",
    "two_stage": "FullyParallelLoadStrategyWrapper reads each shard once and sends it to the ranks that need it",
    "zarr": "zarr checkpoints are not read here: load them with Megatron 0.15 and save them as torch_dist",
}

_refused = make_refusing_getattr(__name__, REFUSED)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}") if name in _MODULES else _refused(name)


__all__ = ["register_default_common_strategies"]

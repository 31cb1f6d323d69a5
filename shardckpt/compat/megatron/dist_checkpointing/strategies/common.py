"""megatron.core.dist_checkpointing.strategies.common."""

from __future__ import annotations

from shardckpt.compat.megatron.defaults import register_built_in_strategies as register_default_common_strategies
from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.dist_checkpointing import load_common_state_dict as load_common

COMMON_STATE_FNAME = "common.pt"

REFUSED = {
    "TorchCommonLoadStrategy": "dist_checkpointing.load_common_state_dict(checkpoint_dir) loads the common state",
    "TorchCommonSaveStrategy": "the sharded strategy stores the common state: leave common_strategy out",
    "save_common": "the sharded strategy stores the common state: dist_checkpointing.save",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = ["COMMON_STATE_FNAME", "load_common", "register_default_common_strategies"]

"""megatron.core.dist_checkpointing.strategies."""

from __future__ import annotations

from shardckpt.compat.megatron.defaults import register_built_in_strategies as register_default_common_strategies
from shardckpt.compat.megatron.refusals import make_importing_getattr

__getattr__ = make_importing_getattr(__name__, __path__)

__all__ = ["register_default_common_strategies"]

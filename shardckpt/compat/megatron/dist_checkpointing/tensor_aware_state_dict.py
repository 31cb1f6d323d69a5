"""megatron.core.dist_checkpointing.tensor_aware_state_dict."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.local.tensor_aware import TensorAwareStateDict as MCoreTensorAwareStateDict

__getattr__ = make_refusing_getattr(__name__)

__all__ = ["MCoreTensorAwareStateDict"]

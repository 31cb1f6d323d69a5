"""megatron.core.dist_checkpointing.tensor_aware_state_dict."""

from __future__ import annotations

from shardckpt.local import TensorAwareStateDict as MCoreTensorAwareStateDict

__all__ = ["MCoreTensorAwareStateDict"]

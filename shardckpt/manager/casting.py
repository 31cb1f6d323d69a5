"""Casts shards for a save in another dtype, such as weights for inference."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shardckpt.huggingface import cast_to, parse_dtype
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import apply_factories, dict_list_map_outplace
from shardckpt.tensors import is_quantized

if TYPE_CHECKING:
    import torch

    from shardckpt.mapping import ShardedStateDict


def cast_shards(described: ShardedStateDict, dtype_name: str | None) -> ShardedStateDict:
    """Cast the floating-point tensors of 16 bits and more.

    Args:
        described: A sharded state dict for a save; neither it nor its tensors are changed.
        dtype_name: The dtype, such as ``"bfloat16"``; None casts nothing.

    Returns:
        A sharded state dict with the cast tensors; quantized and integer tensors and objects are as they were.
    """
    dtype = parse_dtype(dtype_name)
    if dtype is None:
        return described
    copied = dict_list_map_outplace(lambda leaf: leaf, described)  # applying factories changes the dict
    apply_factories(copied)
    return dict_list_map_outplace(lambda leaf: _cast(leaf, dtype), copied)  # type: ignore[no-any-return]


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, ShardedTensor) or leaf.data is None or is_quantized(leaf.data):
        return leaf
    target = cast_to(leaf.dtype, dtype)
    return leaf if target == leaf.dtype else dataclasses.replace(leaf, data=leaf.data.to(target), dtype=target)

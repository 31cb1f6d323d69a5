"""Shards to be saved in another dtype: of weights that are saved for inference."""

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


def with_dtype(described: ShardedStateDict, dtype_name: str | None) -> ShardedStateDict:
    """The same shards, floating-point tensors of 16 bits and more cast; the argument and its tensors stay.

    Args:
        described: What a save takes.
        dtype_name: Such as ``"bfloat16"``; None casts nothing.
    """
    dtype = parse_dtype(dtype_name)
    if dtype is None:
        return described
    copied = dict_list_map_outplace(lambda leaf: leaf, described)
    apply_factories(copied)
    return dict_list_map_outplace(lambda leaf: _cast(leaf, dtype), copied)  # type: ignore[no-any-return]


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, ShardedTensor) or leaf.data is None or is_quantized(leaf.data):
        return leaf
    wanted = cast_to(leaf.dtype, dtype)
    return leaf if wanted == leaf.dtype else dataclasses.replace(leaf, data=leaf.data.to(wanted), dtype=wanted)


__all__ = ["with_dtype"]

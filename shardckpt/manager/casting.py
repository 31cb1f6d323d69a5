"""Casts shards for a save in another dtype, such as weights for inference."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.huggingface.casts import find_model_dtype, parse_casts
from shardckpt.mapping.base import is_main_replica
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import apply_factories, dict_list_map_outplace, nested_values
from shardckpt.tensors.wrappers import is_quantized

if TYPE_CHECKING:
    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import ShardedStateDict

#: The dtypes that a cast is of.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def cast_shards(described: ShardedStateDict, dtype_name: str | None, comm: Comm) -> ShardedStateDict:
    """Collective: return the state dict with floating-point tensors of 16 bits and more cast, as an export casts them.

    Quantized and integer tensors and objects are not cast, and the given dict and its tensors are not changed. A
    ``dtype_name`` of None casts nothing. The ranks find together the dtype of most elements of the model's tensors.
    """
    casts = parse_casts(dtype_name)
    if not casts:
        return described
    with comm.local_phase("describing the model"):
        copied = dict_list_map_outplace(lambda leaf: leaf, described)  # applying factories changes the dict
        apply_factories(copied)
        # replicas once, as the checkpoint has them
        tensors = [leaf for leaf in nested_values(copied) if _is_castable(leaf) and is_main_replica(leaf.replica_id)]
        counts = [(tensor.dtype, tensor.data.numel()) for tensor in tensors]
    # a rank of a pipeline may have the norms alone
    totals = comm.total(*(sum(count for dtype, count in counts if dtype == each) for each in _FLOATS))
    model = find_model_dtype(zip(_FLOATS, totals, strict=True)) if any(totals) else None

    def cast(leaf: Any) -> Any:
        if not _is_castable(leaf):
            return leaf
        target = casts.choose(leaf.key, leaf.dtype, model)
        return leaf if target == leaf.dtype else dataclasses.replace(leaf, data=leaf.data.to(target), dtype=target)

    with comm.local_phase("casting the model"):
        cast_tensors = dict_list_map_outplace(cast, copied)
    return cast_tensors  # type: ignore[no-any-return]


def _is_castable(leaf: Any) -> bool:
    return isinstance(leaf, ShardedTensor) and leaf.data is not None and not is_quantized(leaf.data)

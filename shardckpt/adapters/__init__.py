"""Describe torch's modules, optimizers and distributed tensors as shards, and restore what was loaded into them."""

from shardckpt.adapters.dtensor import describe_dtensor, get_dtensor_splits, sharded_tensor_from_dtensor
from shardckpt.adapters.in_place import InPlaceFactory
from shardckpt.adapters.leaves import describe_leaf, describe_object
from shardckpt.adapters.modules import get_model_tensors
from shardckpt.adapters.restore import get_param_groups
from shardckpt.adapters.state import load_into, to_sharded_state_dict
from shardckpt.adapters.torch_sharded import describe_torch_sharded

__all__ = [
    "InPlaceFactory",
    "describe_dtensor",
    "describe_leaf",
    "describe_object",
    "describe_torch_sharded",
    "get_dtensor_splits",
    "get_model_tensors",
    "get_param_groups",
    "load_into",
    "sharded_tensor_from_dtensor",
    "to_sharded_state_dict",
]

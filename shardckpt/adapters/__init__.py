"""Describe torch's modules, optimizers and distributed tensors as shards, and restore what was loaded into them."""

from shardckpt.adapters.dtensor import describe_dtensor, sharded_tensor_from_dtensor, splits_of
from shardckpt.adapters.in_place import InPlaceFactory
from shardckpt.adapters.leaves import describe_leaf, describe_object
from shardckpt.adapters.modules import model_state
from shardckpt.adapters.restore import groups_of
from shardckpt.adapters.state import load_into, to_sharded_state_dict
from shardckpt.adapters.torch_sharded import describe_torch_sharded

__all__ = [
    "InPlaceFactory",
    "describe_dtensor",
    "describe_leaf",
    "describe_object",
    "describe_torch_sharded",
    "groups_of",
    "load_into",
    "model_state",
    "sharded_tensor_from_dtensor",
    "splits_of",
    "to_sharded_state_dict",
]

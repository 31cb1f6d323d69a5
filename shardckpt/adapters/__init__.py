"""Describe torch's modules, optimizers and distributed tensors as shards, and restore what was loaded into them."""

from shardckpt.adapters.dtensor import (
    describe_dtensor,
    get_dtensor_splits,
    get_local_tensor,
    get_replica_coordinates,
    make_shards,
    sharded_tensor_from_dtensor,
)
from shardckpt.adapters.forms import FORM, is_placeholder, join_path, make_form, rebuild_state
from shardckpt.adapters.group_options import is_group, spread_options
from shardckpt.adapters.in_place import InPlaceFactory
from shardckpt.adapters.kept_options import choose_options, list_option_names
from shardckpt.adapters.leaves import describe_leaf, describe_object, describe_plain_object
from shardckpt.adapters.modules import get_model_tensors, read_versions
from shardckpt.adapters.optimizers import get_param_groups
from shardckpt.adapters.restore import load_into
from shardckpt.adapters.state import SavedModules, to_sharded_state_dict
from shardckpt.adapters.state_layout import empty_state_tensor
from shardckpt.adapters.stored_values import find_name
from shardckpt.adapters.torch_sharded import describe_torch_sharded
from shardckpt.tensors import register_tensor_class

__all__ = [
    "FORM",
    "InPlaceFactory",
    "SavedModules",
    "choose_options",
    "describe_dtensor",
    "describe_leaf",
    "describe_object",
    "describe_plain_object",
    "describe_torch_sharded",
    "empty_state_tensor",
    "find_name",
    "get_dtensor_splits",
    "get_local_tensor",
    "get_model_tensors",
    "get_param_groups",
    "get_replica_coordinates",
    "is_group",
    "is_placeholder",
    "join_path",
    "list_option_names",
    "load_into",
    "make_form",
    "make_shards",
    "read_versions",
    "rebuild_state",
    "register_tensor_class",
    "sharded_tensor_from_dtensor",
    "spread_options",
    "to_sharded_state_dict",
]

"""Describe torch's modules, optimizers and distributed tensors as shards, and restore what was loaded into them."""

from shardckpt.adapters.dtensor import (
    describe_dtensor,
    get_dtensor_splits,
    get_local_tensor,
    get_replica_coordinates,
    make_shards,
    sharded_tensor_from_dtensor,
)
from shardckpt.adapters.forms import is_placeholder, join_path, make_form
from shardckpt.adapters.in_place import InPlaceFactory
from shardckpt.adapters.kept_options import choose_options, list_option_names
from shardckpt.adapters.leaves import describe_leaf, describe_object, describe_plain_object
from shardckpt.adapters.modules import get_model_tensors, read_versions
from shardckpt.adapters.optimizer_loading import load_sharded_optimizer_state_dict
from shardckpt.adapters.optimizer_sharding import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from shardckpt.adapters.optimizers import get_param_groups
from shardckpt.adapters.restore import load_into
from shardckpt.adapters.state import SavedModules, to_sharded_state_dict
from shardckpt.adapters.torch_sharded import describe_torch_sharded
from shardckpt.tensors import register_tensor_class

__all__ = [
    "KEEP_VARS_HINT",
    "InPlaceFactory",
    "SavedModules",
    "choose_options",
    "describe_dtensor",
    "describe_leaf",
    "describe_object",
    "describe_plain_object",
    "describe_torch_sharded",
    "get_dtensor_splits",
    "get_local_tensor",
    "get_model_tensors",
    "get_optim_param_to_id_map",
    "get_param_groups",
    "get_param_id_to_sharded_param_map",
    "get_replica_coordinates",
    "is_placeholder",
    "join_path",
    "list_option_names",
    "load_into",
    "load_sharded_optimizer_state_dict",
    "make_form",
    "make_sharded_optimizer_tensor",
    "make_shards",
    "optim_state_to_sharding_state",
    "read_versions",
    "register_tensor_class",
    "sharded_tensor_from_dtensor",
    "to_sharded_state_dict",
]

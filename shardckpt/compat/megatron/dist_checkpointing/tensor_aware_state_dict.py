"""megatron.core.dist_checkpointing.tensor_aware_state_dict."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.local.tensor_aware import TensorAwareStateDict as MCoreTensorAwareStateDict

#: What to do instead of Megatron's names that are not here.
REFUSED: dict[str, str] = {}

#: What Megatron's module imports from others.
IMPORTED = {
    "dict_utils": ("dict_list_map_inplace", "dict_list_map_outplace", "merge", "nested_values"),
    "exchange_utils": ("ShardDistribution", "determine_main_replica_uniform_distribution", "exchange_by_distribution"),
    "mapping": ("ShardedObject", "ShardedStateDict", "ShardedTensor", "StateDict", "apply_factory_merges"),
    "state_dict_utils": ("load_preprocess", "save_preprocess"),
    "utils": ("_sharded_object_id", "_sharded_tensor_shard_id", "debug_time", "extract_sharded_base", "zip_strict"),
    "validation": (
        "StrictHandling",
        "determine_global_metadata",
        "parse_strict_flag",
        "validate_integrity_and_strict_load",
    ),
}

__getattr__ = make_refusing_getattr(__name__, REFUSED, IMPORTED)

__all__ = ["MCoreTensorAwareStateDict"]

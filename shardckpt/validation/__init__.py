"""What must hold across ranks before bytes move: sharding, replicas, keys, common state."""

from shardckpt.validation.completeness import GivenShards
from shardckpt.validation.descriptions import validate_descriptions
from shardckpt.validation.keys import (
    VERSIONS,
    KeyMismatch,
    OnUnused,
    StrictHandling,
    compare_common,
    compare_keys,
    describe_mismatch,
    find_usual_names,
    is_version_key,
    name_keys,
    parse_on_unused,
    parse_strict_flag,
    stored_key,
    use_bare_keys,
)
from shardckpt.validation.replicas import Replicas, choose_main_replicas, find_replicas
from shardckpt.validation.sharding import describe_shards, validate_shards, validate_shards_by_rank

__all__ = [
    "VERSIONS",
    "GivenShards",
    "KeyMismatch",
    "OnUnused",
    "Replicas",
    "StrictHandling",
    "choose_main_replicas",
    "compare_common",
    "compare_keys",
    "describe_mismatch",
    "describe_shards",
    "find_replicas",
    "find_usual_names",
    "is_version_key",
    "name_keys",
    "parse_on_unused",
    "parse_strict_flag",
    "stored_key",
    "use_bare_keys",
    "validate_descriptions",
    "validate_shards",
    "validate_shards_by_rank",
]

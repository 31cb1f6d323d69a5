"""What must hold across ranks before bytes move: sharding, replicas, keys, common state."""

from shardckpt.validation.completeness import GivenShards
from shardckpt.validation.keys import (
    KeyMismatch,
    StrictHandling,
    compare_common,
    compare_keys,
    mismatch_text,
    parse_strict_flag,
    stored_key,
    validate_shards,
)
from shardckpt.validation.replicas import Replicas, find_replicas, settle_replicas
from shardckpt.validation.sharding import describe_shards, refuse_misfits

__all__ = [
    "GivenShards",
    "KeyMismatch",
    "Replicas",
    "StrictHandling",
    "compare_common",
    "compare_keys",
    "describe_shards",
    "find_replicas",
    "mismatch_text",
    "parse_strict_flag",
    "refuse_misfits",
    "settle_replicas",
    "stored_key",
    "validate_shards",
]

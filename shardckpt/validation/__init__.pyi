from shardckpt.validation.sharding import validate_shards as validate_shards

"""Megatron's names without a counterpart here: importing one raises an error that names the replacement."""

from __future__ import annotations

import importlib
import pkgutil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_ROOT = "shardckpt.compat.megatron.dist_checkpointing"

#: Names that Megatron's modules import from each other, by the module here that has or refuses them.
_NAMES = {
    "core": "CheckpointingConfig CheckpointingException maybe_load_config save_config",
    "dict_utils": "dict_list_map_inplace dict_list_map_outplace diff extract_matching_values merge nested_values",
    "exchange_utils": """
        ShardDistribution determine_main_replica_uniform_distribution exchange_by_distribution
        exchange_loaded_objects_gather_object
    """,
    "mapping": """
        CommonStateDict LocalNonpersistentObject ShardedBase ShardedObject ShardedStateDict ShardedTensor
        ShardedTensorFactory StateDict apply_factories apply_factory_merges is_main_replica
    """,
    "serialization": "CkptShardedMetadata",
    "state_dict_utils": "load_preprocess save_preprocess",
    "strategies.async_utils": "AsyncCallsQueue AsyncRequest _disable_gc",
    "strategies.base": """
        AsyncSaveShardedStrategy LoadCommonStrategy LoadShardedStrategy SaveCommonStrategy SaveShardedStrategy
        StrategyAction register_default_strategy
    """,
    "strategies.cached_metadata_filesystem_reader": "CachedMetadataFileSystemReader",
    "strategies.checkpointable": "CheckpointableShardedTensor LocalShardsContainer",
    "strategies.filesystem_async": "FileSystemWriterAsync",
    "strategies.state_dict_saver": "save_state_dict_async_finalize save_state_dict_async_plan",
    "strategies.torch": "MCoreSavePlanner TorchDistLoadShardedStrategy TorchDistSaveShardedStrategy",
    "utils": """
        _ShardId _clean_metadata_for_serialization _sharded_object_id _sharded_tensor_shard_id debug_time
        extract_sharded_base extract_sharded_tensors_and_factories force_all_tensors_to_non_fp8 zip_strict
    """,
    "validation": """
        StrictHandling determine_global_metadata parse_strict_flag validate_integrity_and_strict_load
        validate_sharded_objects_handling validate_sharding_integrity verify_checkpoint_and_load_strategy
    """,
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

#: Instead of Megatron's writers in the background.
QUEUE = "dist_checkpointing.save(..., async_sharded_save=True) plans, and an AsyncCallsQueue writes and finalizes"


def make_refusal(module: str, instead: str) -> ImportError:
    """Return the error for a missing name or module; ``instead`` names the replacement."""
    return ImportError(f"{module} has no counterpart in shardckpt: {instead}", name=module)


def make_refusing_getattr(module: str, refused: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """Make a module's ``__getattr__`` that refuses names, and finds names that another module here has.

    ``refused`` has the advice for each refused name. Megatron's modules import names from each other, and callers
    import these from any of them. The function raises ImportError for refused names, and AttributeError for unknown
    ones.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the module's
        if name in refused:
            # `from module import name` shows the text of an ImportError, but not of an AttributeError
            raise make_refusal(f"{module}.{name}", refused[name])
        home = f"{_ROOT}.{_HOMES.get(name, '')}"
        if name in _HOMES and home != module:
            # lazy: Megatron's modules import each other in circles
            return getattr(importlib.import_module(home), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def make_importing_getattr(package: str, path: Iterable[str]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``: Megatron's callers reach its modules as attributes, without an import."""
    modules = {module.name for module in pkgutil.iter_modules(path)}

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the package's
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tables import table

if TYPE_CHECKING:
    from types import ModuleType

    from tests.sites import Sites

PACKAGE = "shardckpt.compat.megatron.dist_checkpointing"


#: What users import of releases that are not on PyPI, or of old ones alone; all others are in the source of 0.16.1.
NAMES = {
    "": "LocalNonpersitentObject",
    "mapping": "LocalNonpersitentObject",
    "validation": "INTEGRITY_FNAME save_integrity_manifest verify_checkpoint verify_integrity_manifest",
    "utils": "fallback_logger",
    "strategies.nvrx": "has_nvrx_async_support is_nvrx_min_version make_nvrx_async_request",
    "strategies.base": "default_strategies",
    "strategies.torch": "get_async_strategy get_reformulation_metadata",
    "strategies.async_utils": "DistributedAsyncCaller",
    "strategies.filesystem_async": "get_write_results_queue",
    "strategies.common": "load_common save_common",
}


#: Methods and attributes that Megatron's users call on what they import.
MEMBERS = {
    "mapping.ShardedTensor": """
        from_rank_offsets from_rank_offsets_flat global_slice has_regular_grid init_data local_chunk_offset_in_global
        max_allowed_chunks narrow validate_metadata_integrity without_data
    """,
    "mapping.ShardedObject": "empty_from_unique_key unique_key validate_metadata_integrity without_data",
    "mapping.ShardedTensorFactory": "build validate_metadata_integrity without_data",
    "mapping.LocalNonpersistentObject": "unwrap",
    "validation.StrictHandling": """
        ASSUME_OK_UNEXPECTED IGNORE_ALL LOG_ALL LOG_UNEXPECTED RAISE_ALL RAISE_UNEXPECTED RETURN_ALL RETURN_UNEXPECTED
        requires_explicit_ckpt_mismatch_check requires_global_app_metadata requires_returning_mismatch_keys
    """,
    "strategies.base.StrategyAction": "LOAD_COMMON LOAD_SHARDED SAVE_COMMON SAVE_SHARDED",
    "strategies.torch.TorchDistSaveShardedStrategy": "async_save backend can_handle_sharded_objects save version",
    "strategies.torch.TorchDistLoadShardedStrategy": """
        can_handle_sharded_objects check_backend_compatibility check_version_compatibility load load_sharded_metadata
        load_tensors_metadata remove_sharded_tensors
    """,
    "strategies.torch.MCoreSavePlanner": """
        create_decentralized_global_plan create_global_plan create_local_plan finish_plan lookup_object resolve_data
        set_up_planner transform_object
    """,
    "strategies.torch.MCoreLoadPlanner": """
        _temporarily_bypass_shape_validation _validate_global_shapes commit_tensor create_global_plan create_local_plan
        finish_plan load_bytes lookup_tensor resolve_tensor set_up_planner transform_tensor
    """,
    "strategies.fully_parallel.FullyParallelSaveStrategyWrapper": "async_save save",
    "strategies.fully_parallel.FullyParallelLoadStrategyWrapper": """
        check_backend_compatibility check_version_compatibility load load_sharded_metadata load_tensors_metadata
    """,
    "strategies.async_utils.AsyncRequest": "add_finalize_fn execute_sync freeze",
    "strategies.async_utils.AsyncCallsQueue": """
        close get_num_unfinalized_calls maybe_finalize_async_calls schedule_async_request warmup_persistent_caller
    """,
    "tensor_aware_state_dict.MCoreTensorAwareStateDict": """
        common_state_dict copy_tensors_to_cpu from_state_dict init_tensors insert_tensors is_hollow pop_tensors
        restore_tensor_device tensors to_state_dict
    """,
}

RELEASES = [
    "0.16.1",
    pytest.param("0.9.0", marks=pytest.mark.ci),
    *(pytest.param(release, marks=pytest.mark.proof) for release in ("0.12.3", "0.13.1", "0.15.3")),
]


#: Modules that later releases of Megatron dropped or renamed, and that are refused by name as a whole.
DROPPED = {
    "state_dict_transformation",
    "strategies.resharding",
    "strategies.tensorstore",
    "strategies.two_stage",
    "strategies.zarr",
}


#: Not meant to be imported: a flag that says whether Transformer Engine is there.
FLAGS = {"HAVE_TE_FLOAT8TENSOR"}


def _module(path: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{path}" if path else PACKAGE)


def _path(file: Path, folder: Path) -> str:
    return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def _refused(module: ModuleType) -> dict[str, str]:
    return getattr(module, "REFUSED", {})


@table(("path", "name"), [(path, name) for path, names in NAMES.items() for name in names.split()])
def test_every_name_is_there_or_says_what_is(path: str, name: str) -> None:
    """Each name resolves, or is refused with what to use instead."""
    module = _module(path)
    assert name in _refused(module) or getattr(module, name) is not None


def list_modules() -> list[str]:
    """Modules of the package; ``gpt_checkpoint_interop`` has any name."""
    folder = Path(_module("").__file__ or "").parent
    found = {_path(file, folder) for file in folder.rglob("*.py")}
    return sorted(found - DROPPED - {"gpt_checkpoint_interop"})


@table("path", list_modules())
def test_a_module_gives_what_it_names(path: str) -> None:
    """What a module lists, it has; what it refuses, it does not have; other names are AttributeErrors as usual."""
    module = _module(path)
    assert all(hasattr(module, name) for name in module.__all__)
    assert not {name for name in _refused(module) if name in vars(module)}
    for name in _refused(module):
        with pytest.raises(ImportError, match=r"has no counterpart in shardckpt: .{15}"):
            getattr(module, name)
    assert not hasattr(module, "anything_else")


@table(("owner", "members"), MEMBERS.items())
def test_what_is_imported_has_its_methods(owner: str, members: str) -> None:
    """Classes have the methods and members that Megatron's users call."""
    path, _, name = owner.rpartition(".")
    assert not {member for member in members.split() if not hasattr(getattr(_module(path), name), member)}


def test_the_refusal_is_shown_by_an_import() -> None:
    """``from ... import Name`` shows the way out too, which an AttributeError would not."""
    with pytest.raises(ImportError, match="AsyncCallsQueue"):
        from shardckpt.compat.megatron.dist_checkpointing.strategies.state_dict_saver import (
            save_state_dict_async_plan,  # noqa: F401
        )


@pytest.mark.parametrize("release", RELEASES)
def test_every_public_name_of_a_release_is_known(sites: Sites, release: str) -> None:
    """Each public top-level name in the release's own source resolves here, or is refused with what to use instead."""
    site = sites(f"megatron-core-{release}")
    source = site / "megatron" / "core" / "dist_checkpointing"
    unknown = []
    for file in sorted(source.rglob("*.py")):
        path = _path(file, source)
        if path in DROPPED:
            continue
        module = _module(path)
        known = {*vars(module), *_refused(module)}
        unknown += [f"{path}.{name}" for name in _public(file) - FLAGS if name not in known]
    assert not unknown
    assert {"optim_state_to_sharding_state", "get_optim_param_to_id_map"} < _public(source / "optimizer.py")


def _public(file: Path) -> set[str]:
    """Names that a module defines, or a package brings together; loggers and type variables are no one's to import."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and not _is_internal(node.value):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and file.name == "__init__.py":
            names.update(alias.asname or alias.name for alias in node.names)
    return {name for name in names if not name.startswith("_")}


def _private_and_imported(file: Path, package: Path) -> set[str]:
    """Names with an underscore that a module defines, and names that it imports from other modules of the package."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("megatron.core.dist_checkpointing")
            depth = len(file.parent.relative_to(package).parts)
            if 0 < node.level <= depth + 1 or module != (node.module or ""):
                names.update(f"_ {alias.asname or alias.name}" for alias in node.names)
    return {name.removeprefix("_ ") for name in names if name.startswith("_")}


def test_private_and_imported_names_resolve_or_say_why_not(sites: Sites) -> None:
    """Megatron's trainer and tests import such names, too, from any module that has them: no bare AttributeError."""
    source = sites("megatron-core-0.16.1") / "megatron/core/dist_checkpointing"
    unknown, found = [], 0
    for file in sorted(source.rglob("*.py")):
        path = _path(file, source)
        for name in _private_and_imported(file, source):
            found += 1
            try:
                assert getattr(_module(path), name, None) is not None or name == "_results_queue"
            except ImportError as error:
                assert "has no counterpart in shardckpt: " in str(error)  # noqa: PT017 - either outcome is right
            except AssertionError:
                unknown.append(f"{path}.{name}")
    assert not unknown
    assert found > 150


def _is_internal(value: Any) -> bool:
    made_by = value.func if isinstance(value, ast.Call) else None
    name = made_by.attr if isinstance(made_by, ast.Attribute) else getattr(made_by, "id", "")
    return name in ("getLogger", "TypeVar")


@table("path", sorted(DROPPED))
def test_modules_that_megatron_removed_say_so(path: str) -> None:
    """An import of a module that older releases had is an ImportError with the way out, not a missing module."""
    parent, _, name = path.rpartition(".")
    for attempt in (lambda: _module(path), lambda: getattr(_module(parent), name)):
        with pytest.raises(ImportError, match=rf"{path} has no counterpart in shardckpt: \w+") as caught:
            attempt()
        assert not isinstance(caught.value, ModuleNotFoundError)

"""What users import: the paths that the documents have shown stay, whatever room the code behind them is in."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.readmes import BLOCKS, READMES
from tests.tables import table
from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Modules, and the names in them, that a README has shown.
PUBLIC = {
    "shardckpt": (
        "AsyncSaveStrategy BackgroundWork CheckpointReader CheckpointWriter CheckpointingException ChunkLoadStrategy "
        "Event FileWriter LoadContext LoadStrategy LocalNonpersistentObject Migration PlanContext PreparedSave "
        "SaveContext SaveStrategy ShardedObject ShardedTensor ShardedTensorFactory StoredChunk decode_object "
        "dist_checkpointing encode_object fingerprint hookimpl"
    ),
    "shardckpt.dist_checkpointing": (
        "ShardedTensor get_default_load_sharded_strategy get_default_save_sharded_strategy load open_checkpoint save"
    ),
    "shardckpt.async_save": "AsyncCallsQueue release_memory",
    "shardckpt.archive": "decode_object encode_object",
    "shardckpt.mapping": "ShardedTensor is_main_replica",
    "shardckpt.errors": "CannotLoadError CheckpointingException",
    "shardckpt.parallel": "FullyParallelLoadStrategyWrapper FullyParallelSaveStrategyWrapper",
    "shardckpt.quantized": "native_factory",
    "shardckpt.optimizer": (
        "get_optim_param_to_id_map get_param_id_to_sharded_param_map make_sharded_optimizer_tensor "
        "optim_state_to_sharding_state"
    ),
    "shardckpt.manifest": "Integrity Marker Record",
    "shardckpt.state_dict": "nested_values",
    "shardckpt.stubs": "Stub",
    "shardckpt.strategy": "AsyncSaveStrategy LoadStrategy Migration SaveStrategy",
    "shardckpt.settings": "",
    "shardckpt.plugins": "",
    "shardckpt.distributed": "",
    "shardckpt.planning": "Box BoxFinder part_view shard_parts",
    "shardckpt.storage": "CheckpointReader CheckpointWriter",
    "shardckpt.tensors": "plain_cpu tensor_bytes",
    "shardckpt.testing": (
        "Destinations FaultyStore RankPool SaveLoadCase StrategyContract layouts make_state_dict save_load_cases "
        "tensor_specs"
    ),
    "shardckpt.optimizer_state": "load_sharded_optimizer_state_dict",
    "shardckpt.local": "CliqueReplication LocalCheckpointManager TensorAwareStateDict load_local save_local",
    "shardckpt.maintenance": "compute_ema_weights compute_wsm_weights convert_checkpoint merge_checkpoints",
    "shardckpt.manager": (
        "AsyncMode CheckpointConfig CheckpointManager FaultTolerance KeepBest KeepEvery KeepLatest KeepPinned PerRank "
        "ReplicaManager RetentionPolicy Stateful cleanup_old_checkpoints"
    ),
    "shardckpt.adapters": "load_into to_sharded_state_dict",
    "shardckpt.huggingface": (
        "dcp_to_torch_state_dict export_to_huggingface load_from_huggingface torch_save_to_dcp KeyMapping Rule "
        "RuleMapping"
    ),
    "shardckpt.compat.megatron": "",
    "shardckpt.compat.mindspeed": (
        "EPLoadPlanner EPSpecInfo build_ep_fqn2spec_info cleanup_old_checkpoints "
        "create_default_local_load_plan_with_moe dcp_to_torch_state_dict drop_ep_dim empty_cache get_check_moe_func "
        "get_chunk_readitem get_dtype_size get_shard_info restore_ep_dim save_state_dict synchronize"
    ),
    "shardckpt.compat.torch_optimizer": "load_sharded_optimizer_state_dict",
    "shardckpt.compat.torchtitan": (
        "AsyncMode CheckpointManager DATALOADER LR_SCHEDULER MODEL ModelWrapper OPTIMIZER TRAIN_STATE"
    ),
    "shardckpt.compat.megatron.dist_checkpointing": "ShardedTensor load save",
    "shardckpt.compat.megatron.dist_checkpointing.strategies.base": "LoadShardedStrategy register_default_strategy",
    "shardckpt.compat.megatron.dist_checkpointing.utils": "apply_prefix_mapping",
    "shardckpt.chunks": "ChunkSaveStrategy",
    "shardckpt.cli": "Output add_json main",
    "shardckpt_torch_dist": (
        "CheckpointStorageReader CheckpointStorageWriter ShardedLoadPlanner ShardedSavePlanner "
        "TorchDistLoadShardedStrategy TorchDistSaveShardedStrategy"
    ),
    "shardckpt_safetensors": "SafetensorsSaveShardedStrategy",
    "shardckpt_ep": "EPLoadPlanner EPSavePlanner ExpertLayout expert_layouts expert_sharded_state_dict",
}

#: Modules of the trainers' packages, which need not be installed here.
INTEGRATIONS = {
    "shardckpt.integrations.accelerate": "register_sharded_state",
    "shardckpt.integrations.lightning": "ShardedCheckpointIO",
    "shardckpt.integrations.opentelemetry": "OpenTelemetryListener",
    "shardckpt.integrations.prometheus": "PrometheusListener",
    "shardckpt.integrations.torchtitan": "TitanCheckpointManager",
    "shardckpt.integrations.transformers": "ShardedCheckpointCallback",
    "shardckpt.integrations.vllm": "ShardedCheckpointLoader",
}


@table("module", PUBLIC)
def test_a_shown_path_has_its_names(module: str) -> None:
    """A module that a README has shown has the names that it had."""
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module].split() if not hasattr(found, name)] == []


@table("module", PUBLIC)
def test_dir_has_what_the_module_offers(module: str) -> None:
    """``dir`` of a public module, by which shells complete, has all that its ``__all__`` has."""
    found = importlib.import_module(module)
    assert {*getattr(found, "__all__", ())} <= {*dir(found)}


def test_dir_has_names_before_their_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of a lazy package are listed while the modules that have them are not imported yet."""
    (folder := tmp_path / "lazy_package").mkdir()
    (folder / "__init__.py").write_text(
        "from shardckpt.lazy import attach_stub\n\n__getattr__, __dir__, __all__ = attach_stub(__name__)\n"
    )
    (folder / "__init__.pyi").write_text("from lazy_package.late import later as later\n")
    (folder / "late.py").write_text("later = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("lazy_package")
    assert "later" in dir(package)
    assert package.__all__ == ["later"]
    assert "lazy_package.late" not in sys.modules
    assert package.later == 1
    with pytest.raises(AttributeError, match="no attribute 'never'"):
        _ = package.never


def test_a_public_name_that_is_elsewhere_says_where() -> None:
    """Asked of shardckpt itself, by an import or an attribute: the line that imports it, and no name spelt like it."""
    package = importlib.import_module("shardckpt")
    names = {
        name
        for module, shown in PUBLIC.items()
        if re.fullmatch(r"shardckpt\.\w+", module) and module != "shardckpt.cli"
        for name in shown.split()
    } - {*package.__all__}
    assert "CheckpointManager" in names
    for name in sorted(names):
        with pytest.raises(AttributeError) as attribute:
            getattr(package, name)
        with pytest.raises(ImportError) as imported:
            exec(f"from shardckpt import {name}", {})
        assert str(attribute.value) == str(imported.value)
        line = str(attribute.value).partition(": ")[2]
        exec(line, {})
        assert line == f"from {line.split()[1]} import {name}"
        assert attribute.value.name is None
        assert not hasattr(package, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'no_such_name'$"):
        _ = package.no_such_name


def test_a_name_that_is_none_is_only_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hasattr`` says False of any text; the public modules are parsed once, and not for each name that is absent."""
    package = importlib.import_module("shardckpt.manager")
    assert [name for name in ("a.b", "settings.", "", "no name", "no_such_name") if hasattr(package, name)] == []
    monkeypatch.setattr("shardckpt.lazy.ast.parse", None)
    assert not hasattr(package, "no_other_name")


def _ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("shardckpt")


def _callables(module: str) -> Iterator[tuple[str, Any]]:
    """Functions, classes and public methods of our own that a module offers; protocols are not called."""
    found = importlib.import_module(module)
    for name in sorted({*getattr(found, "__all__", ()), *PUBLIC[module].split()}):
        value = getattr(found, name)
        if not _ours(value) or getattr(value, "_is_protocol", False):
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            if _ours(value.__init__):
                yield name, value
            for method, function in inspect.getmembers(value, inspect.isroutine):
                # a cached_property is a routine since Python 3.13
                if not method.startswith("_") and callable(function) and _ours(function):
                    yield f"{name}.{method}", function


def _is_bare(function: Any) -> bool:
    """Whether a signature says nothing of the arguments."""
    try:
        given = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    except ValueError:  # a class that Python knows no signature of: its constructor is a builtin one
        return False
    return [p.kind for p in given] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


#: Signatures that take anything: a stand-in for a class that is not there, and torch's own of its StorageReader.
TAKES_ANYTHING = {"Stub", "CheckpointStorageReader.read_metadata", "CheckpointStorageReader.set_up_storage_reader"}


@table("module", PUBLIC)
def test_signatures_say_what_there_is(module: str) -> None:
    """``help`` of every public function, class and method names its arguments."""
    bare = {name for name, value in _callables(module) if _is_bare(value)}
    assert bare <= TAKES_ANYTHING


def test_megatrons_keywords_are_shown() -> None:
    """``inspect.signature`` of save and load has Megatron's keywords in Megatron's order, with its defaults."""
    dist_checkpointing: Any = importlib.import_module("shardckpt.dist_checkpointing")
    saves = inspect.signature(dist_checkpointing.save).parameters
    assert [*saves][:9] == [
        "sharded_state_dict",
        "checkpoint_dir",
        "sharded_strategy",
        "validate_access_integrity",
        "async_sharded_save",
        "preprocess_common_before_consistancy_check",
        "content_metadata",
        "async_strategy",
        "verify_integrity",
    ]
    assert [saves[name].default for name in [*saves][2:9]] == [None, True, False, None, None, "nvrx", False]
    loads = inspect.signature(dist_checkpointing.load).parameters
    assert [*loads][:7] == [
        "sharded_state_dict",
        "checkpoint_dir",
        "sharded_strategy",
        "validate_access_integrity",
        "strict",
        "verify_integrity",
        "process_group",
    ]


@table("module", INTEGRATIONS)
def test_an_integration_has_its_name(module: str) -> None:
    """A trainer's integration is where it was; of a trainer that is not installed, the file says so."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    assert re.search(rf"^(?:def|class) {INTEGRATIONS[module]}\b", path.read_text(), re.MULTILINE)


def test_the_readmes_show_public_paths() -> None:
    """Each dotted name that a README shows can be imported, and its module is one of those that stay."""
    compat = "shardckpt/compat/README.md"
    # the table of names has a test of its own
    documents = {**READMES, compat: READMES[compat].partition("## Names and signatures")[0]}
    text = "\n".join(documents.values())
    shown = set(re.findall(r"`((?:shardckpt|shardckpt_torch_dist|shardckpt_ep)(?:\.\w+)+)(?:\(|`)", text))
    for block in BLOCKS:
        for node in ast.walk(ast.parse(block.code)) if block.language == "python" else ():
            if isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
                shown.update(f"{node.module}.{alias.name}" for alias in node.names)
    assert "shardckpt.parallel.FullyParallelLoadStrategyWrapper" in shown
    for name in sorted(shown - {"shardckpt.json"}):
        module, _, attribute = name.rpartition(".")
        known = {*PUBLIC, *INTEGRATIONS}
        assert name in known or (module in known and _has(module, attribute)), name


def _is_ours(module: str) -> bool:
    """Whether an example imports it from us: shardckpt_json is what the reader of another example has written."""
    return module.startswith("shardckpt") and module != "shardckpt_json"


def _has(module: str, name: str) -> bool:
    """Whether a module is one of those that stay, and has a name; trainers' packages need not be installed."""
    return name == INTEGRATIONS.get(module) or hasattr(importlib.import_module(module), name)


def test_the_example_plugins_enter_by_doors() -> None:
    """The plugins that authors copy from import nothing from inside a room."""
    for path in sorted((ROOT / "tests" / "plugins").glob("*_v*/shardckpt_*/*.py")):
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        inside = [node.module for node in froms if re.match(r"shardckpt\.\w+\.", node.module or "")]
        assert inside == [], path

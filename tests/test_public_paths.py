"""What users import: the paths that the documents have shown stay, whatever room the code behind them is in."""

from __future__ import annotations

import ast
import importlib
import re

from tests.readmes import BLOCKS, READMES
from tests.tables import table
from tests.tree import ROOT

#: Modules, and the names in them, that a README has shown.
PUBLIC = {
    "shardckpt": (
        "AsyncSaveStrategy BackgroundWork CheckpointReader CheckpointWriter CheckpointingException Event FileWriter "
        "LoadContext LoadStrategy LocalNonpersistentObject Migration PlanContext PreparedSave SaveContext SaveStrategy "
        "ShardedObject ShardedTensor ShardedTensorFactory decode_object dist_checkpointing encode_object fingerprint "
        "hookimpl"
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
    "shardckpt.compat.megatron.dist_checkpointing.utils": "apply_prefix_mapping",
    "shardckpt.chunks": "ChunkSaveStrategy",
    "shardckpt.cli": "main",
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

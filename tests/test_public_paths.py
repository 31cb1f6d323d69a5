"""What users import: the paths that the documents have shown stay, whatever room the code behind them is in."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()

#: Modules, and the names in them, that the README has shown.
PUBLIC = {
    "shardckpt": (
        "CheckpointingException Event LoadContext LoadStrategy LocalNonpersistentObject Migration SaveContext "
        "SaveStrategy ShardedObject ShardedTensor ShardedTensorFactory dist_checkpointing hookimpl"
    ),
    "shardckpt.dist_checkpointing": (
        "ShardedTensor get_default_load_sharded_strategy get_default_save_sharded_strategy load open_checkpoint save"
    ),
    "shardckpt.async_save": "AsyncCallsQueue release_memory",
    "shardckpt.mapping": "ShardedTensor is_main_replica",
    "shardckpt.errors": "CannotLoadError CheckpointingException",
    "shardckpt.parallel": "FullyParallelLoadStrategyWrapper FullyParallelSaveStrategyWrapper",
    "shardckpt.quantized": "native_factory",
    "shardckpt.optimizer": (
        "get_optim_param_to_id_map get_param_id_to_sharded_param_map make_sharded_optimizer_tensor "
        "optim_state_to_sharding_state"
    ),
    "shardckpt.optimizer_state": "load_sharded_optimizer_state_dict",
    "shardckpt.local": "CliqueReplication LocalCheckpointManager TensorAwareStateDict load_local save_local",
    "shardckpt.manager": (
        "AsyncMode CheckpointConfig CheckpointManager FaultTolerance KeepBest KeepEvery KeepLatest KeepPinned PerRank "
        "ReplicaManager RetentionPolicy Stateful cleanup_old_checkpoints"
    ),
    "shardckpt.adapters": "load_into to_sharded_state_dict",
    "shardckpt.huggingface": (
        "dcp_to_torch_state_dict export_to_huggingface load_from_huggingface torch_save_to_dcp KeyMapping RuleMapping"
    ),
    "shardckpt.compat.megatron": "",
    "shardckpt.compat.megatron.dist_checkpointing": "ShardedTensor load save",
    "shardckpt.compat.megatron.dist_checkpointing.utils": "apply_prefix_mapping",
    "shardckpt.cli": "main",
    "shardckpt_torch_dist": (
        "CheckpointStorageReader CheckpointStorageWriter ShardedLoadPlanner ShardedSavePlanner "
        "TorchDistLoadShardedStrategy TorchDistSaveShardedStrategy"
    ),
    "shardckpt_ep": "EPLoadPlanner EPSavePlanner ExpertLayout expert_layouts expert_sharded_state_dict",
}

#: Modules of the trainers' packages, which need not be installed here.
INTEGRATIONS = {
    "shardckpt.integrations.accelerate": "register_sharded_state",
    "shardckpt.integrations.lightning": "ShardedCheckpointIO",
    "shardckpt.integrations.torchtitan": "TitanCheckpointManager",
    "shardckpt.integrations.transformers": "ShardedCheckpointCallback",
}

#: Modules that a command or a plugin's registration imports before it knows whether torch is needed.
LIGHT = (
    "shardckpt",
    "shardckpt.plugins.hookspecs",
    "shardckpt.integrations.fsspec.plugin",
    "shardckpt_torch_dist.plugin",
    "shardckpt_ep.plugin",
)


@pytest.mark.parametrize("module", PUBLIC)
def test_a_shown_path_has_its_names(module: str) -> None:
    """A module that the README has shown has the names that it had."""
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_an_integration_has_its_name(module: str) -> None:
    """A trainer's integration is where it was; of a trainer that is not installed, the file says so."""
    path = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
    assert re.search(rf"^(?:def|class) {INTEGRATIONS[module]}\b", path.read_text(), re.MULTILINE)


def test_the_readme_shows_public_paths() -> None:
    """Each dotted name that the README shows can be imported, and its module is one of those that stay."""
    shown = set(re.findall(r"`((?:shardckpt|shardckpt_torch_dist|shardckpt_ep)(?:\.\w+)+)(?:\(|`)", README))
    shown |= set(re.findall(r"^from (shardckpt\S*) import", README, re.MULTILINE))
    assert "shardckpt.parallel" in shown
    for name in sorted(shown - {"shardckpt.integrations", "shardckpt.json"}):
        module, _, attribute = name.rpartition(".")
        known = {*PUBLIC, *INTEGRATIONS}
        assert name in known or (module in known and hasattr(importlib.import_module(module), attribute)), name


@pytest.mark.parametrize("module", LIGHT)
def test_listing_needs_no_torch(module: str) -> None:
    """What is imported to list plugins and verbs imports no torch."""
    code = f"import sys, {module}; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr

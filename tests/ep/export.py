"""What the tests of export share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.huggingface import export_to_huggingface
from tests.ep.live import whole

if TYPE_CHECKING:
    from pathlib import Path


HUB_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


FILE_BYTES = 600  # of which the folder has several then, written by several ranks


def make_experts() -> dict[str, torch.Tensor]:
    """The whole tensors of experts of two layers: every element another number."""
    names = [f"layers.{layer}.moe.experts.{name}" for layer in (0, 1) for name in HUB_NAMES]
    return {name: whole(5) + 1000 * number for number, name in enumerate(names)}


def make_others() -> dict[str, torch.Tensor]:
    """The tensors that are no experts."""
    return {
        "tok_embeddings.weight": torch.arange(35.0).reshape(7, 5),
        "layers.0.moe.router.gate.weight": torch.arange(15.0).reshape(5, 3),
        "layers.0.attention_norm.weight": torch.tensor([3.0, 1.0]),
        "layers.0.moe.expert_bias": torch.ones(5),
    }


def state(experts: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Model and optimizer, as a trainer would save them."""
    slots = {name: {"exp_avg": value, "step": torch.tensor(2.0)} for name, value in moments.items()}
    return {"model": {**experts, **make_others()}, "optimizer": {"state": slots}, "step": 2}


def export_files(checkpoint: Path, target: Path) -> None:
    """Export in files of a small size."""
    export_to_huggingface(checkpoint, target, mapping="qwen3_moe", max_shard_size=FILE_BYTES)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process, that has all experts, saves and exports."""
    folder = tmp_path_factory.mktemp("whole")
    moments = {name: value * 0.5 for name, value in make_experts().items()}
    dist_checkpointing.save(to_sharded_state_dict(state(make_experts(), moments)), folder / "checkpoint")
    export_files(folder / "checkpoint", folder / "hub")
    return folder / "hub"

"""The folder of an operator: checkpoints of twelve origins, some of them damaged, and what is none."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.damage import flip
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

#: What was saved whole, by its path in the folder, with the library that the table names.
SOUND = {
    "llama/step-100": "shardckpt",
    "llama/step-200": "shardckpt",
    "llama/step-300": "shardckpt",
    "llama/step-400": "shardckpt",
    "epochs/epoch_3": "shardckpt",
    "moe/step-10": "shardckpt",
    "megatron/iter_0000100": "Megatron-Core",
    "zarr/iter_0000001": "Megatron-Core",
    "titan/step-10": "PyTorch DCP",
    "plain/dcp": "PyTorch DCP",
    "deepspeed/global_step2": "DeepSpeed",
    "deepspeed/universal": "DeepSpeed",
    "torch_checkpointing/step-1": "torch_checkpointing",
    "hub/llama": "Hugging Face",
    "bin": "Hugging Face",
    "lightning/epoch=3-step=100.ckpt": "torch.save",
    "model.pt": "torch.save",
    "weights.safetensors": "safetensors",
}
#: What was damaged, by its path, with words of which one is in what an error says.
DAMAGED = {
    "llama/step-500": ("distcp",),  # a bit of a tensor with a digest
    "llama/step-600": ("did not end",),  # as of a save that was killed
    "megatron/iter_0000200": ("CRC-32",),  # a bit of a tensor without a digest
    "titan/step-20": ("distcp",),  # it is missing
    "hub/cut": ("model.safetensors",),  # it is cut
    "cut.pt": ("cut short",),
}
#: The states of those of them where no tensor need be read.
SEEN_AT_A_GLANCE = {
    "titan/step-20": "damaged",
    "hub/cut": "damaged",
    "cut.pt": "damaged",
    "llama/step-600": "incomplete",
}
#: What no verb reads, by its path, with its state.
OTHERS = {"orbax": "unreadable", "logs": "other"}


def make_zoo(root: Path) -> None:
    """Fill a folder."""
    _make_runs(root)
    for version, step in (("0.16.1", 100), ("0.20.0", 200)):
        shutil.copytree(GOLDEN / f"mcore-{version}", root / "megatron" / f"iter_{step:07}")
    (root / "megatron" / "latest_checkpointed_iteration.txt").write_text("200")
    shutil.copytree(GOLDEN / "zarr-mcore-0.15.3", root / "zarr" / "iter_0000001")
    shutil.copytree(GOLDEN / "deepspeed" / "zero2", root / "deepspeed" / "global_step2")
    shutil.copytree(GOLDEN / "deepspeed" / "universal-zero1", root / "deepspeed" / "universal")
    shutil.copytree(GOLDEN / "torch-checkpointing-0.1.1" / "mesh-4", root / "torch_checkpointing" / "step-1")
    tensors = {"layers.0.weight": torch.arange(64.0).reshape(8, 8), "layers.1.weight": torch.ones(8, 8)}
    for path in ("titan/step-10", "titan/step-20", "plain/dcp"):
        dcp.save({**tensors, "step": 3}, checkpoint_id=root / path, no_dist=True)
    for path in ("hub/llama", "hub/cut"):
        (root / path).mkdir(parents=True, exist_ok=True)
        save_file(tensors, root / path / "model.safetensors")
        (root / path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, root / "weights.safetensors")
    (root / "lightning").mkdir()
    for path in ("model.pt", "cut.pt"):
        torch.save(tensors, root / path)
    torch.save({"state_dict": tensors, "epoch": 3}, root / "lightning" / "epoch=3-step=100.ckpt")
    (root / "bin").mkdir()
    torch.save(tensors, root / "bin" / "pytorch_model-00001-of-00001.bin")
    weight_map = dict.fromkeys(tensors, "pytorch_model-00001-of-00001.bin")
    (root / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (root / "orbax").mkdir()
    (root / "orbax" / "_CHECKPOINT_METADATA").write_text("{}")
    (root / "logs").mkdir()
    (root / "logs" / "train.log").write_text("loss")
    _damage(root)


def _make_runs(root: Path) -> None:
    """Save what a CheckpointManager of ours saves, and the other formats."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    config = CheckpointConfig(folder=str(root / "llama"), interval=100, best_metric="loss")
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        for step in range(100, 700, 100):
            manager.save(step, metrics={"loss": 1 / step})
    state = to_sharded_state_dict(model, optimizer)
    dc.save(state, root / "epochs" / "epoch_3", "safetensors")
    dc.save(state, root / "moe" / "step-10", "ep")


def _damage(root: Path) -> None:
    flip(max((root / "llama" / "step-500").glob("*.distcp"), key=lambda file: file.stat().st_size))
    for name in (".metadata", "metadata.json", "shardckpt.json"):
        (root / "llama" / "step-600" / name).unlink()
    flip(max((root / "megatron" / "iter_0000200").glob("*.distcp"), key=lambda file: file.stat().st_size))
    next((root / "titan" / "step-20").glob("*.distcp")).unlink()
    for file in (root / "hub" / "cut" / "model.safetensors", root / "cut.pt"):
        os.truncate(file, file.stat().st_size - 5)

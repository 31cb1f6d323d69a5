"""The golden checkpoints of Megatron, by every way to load them here."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import KeyMismatchError
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt_torch_dist import CheckpointStorageReader
from tests.golden.write_zarr import COMMON, TENSORS, global_tensor
from tests.golden_checkpoints import global_tensors
from tests.interop.stock import Kept
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

STEP = 17


class Megatron:
    """A model and its optimizer that describe themselves, as Megatron's do."""

    def __init__(self, expected: dict[str, torch.Tensor]) -> None:
        self._expected = expected
        self.loaded: dict[str, Any] = {}

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return memory for this rank's parts."""
        return to_sharded_state_dict(blank_dtensors(self._expected))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what is given."""
        self.loaded = state_dict


def find_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that a golden checkpoint has, whole."""
    before, _, version = checkpoint.name.partition("mcore-")
    return {key: global_tensor(key) for key in TENSORS} if before == "zarr-" else global_tensors(version)


def blank_dtensors(expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return DTensors of the same shapes by rows, with other values."""
    return {key: _distribute(torch.ones_like(tensor)) for key, tensor in expected.items()}


def check_dtensors(loaded: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    """Compare this rank's parts."""
    assert expected.keys() <= loaded.keys()
    for key, tensor in expected.items():
        assert torch.equal(loaded[key].to_local(), _distribute(tensor).to_local()), key


def _distribute(tensor: torch.Tensor) -> DTensor:
    # each rank takes its part of a tensor that all have: gloo does not send every dtype
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)], src_data_rank=None)


def copy_as_step(checkpoint: Path, folder: Path) -> None:
    """Copy a golden checkpoint to where a manager looks for it."""
    shutil.copytree(checkpoint, folder / f"step-{STEP}")


def load_by_manager(folder: Path, checkpoint: Path) -> None:
    """Load model and optimizer, and a dict of the common state, by a manager; the step is the folder's name."""
    expected = find_tensors(checkpoint)
    megatron, args = Megatron(expected), Kept()
    states = {"megatron": megatron, "args": args}
    with CheckpointManager(CheckpointConfig(folder=str(folder)), states) as manager:
        assert manager.load()
        assert manager.loaded_step == STEP
    check_dtensors(megatron.loaded, expected)
    assert args.loaded == COMMON["args"]


def load_by_adapters(checkpoint: Path) -> None:
    """Load tensors into DTensors by their names, with the common state."""
    expected = find_tensors(checkpoint)
    memory = blank_dtensors(expected)
    loaded = dist_checkpointing.load(to_sharded_state_dict(memory), checkpoint)
    check_dtensors(loaded, expected)
    check_dtensors(memory, expected)
    assert {key: loaded[key] for key in COMMON} == COMMON
    norm = torch.nn.ModuleDict({"final_layernorm": torch.nn.LayerNorm(5, bias=False)})
    model = torch.nn.ModuleDict({"decoder": norm})
    wanted = to_sharded_state_dict(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(KeyMismatchError, match=r"optimizer\.param_groups\.decoder\.final_layernorm\.weight") as refused:
        dist_checkpointing.load(wanted, checkpoint)
    name = "decoder.final_layernorm.weight"
    assert f"The checkpoint has '{name}' and not 'model.{name}' (1 key so)" in str(refused.value)


def load_by_reader(checkpoint: Path) -> None:
    """Load DTensors and an object by ``dcp.load``, which knows no common state."""
    expected = find_tensors(checkpoint)
    state: dict[str, Any] = {**blank_dtensors(expected), "rng_state/shard_0.1_2.2": None}
    dcp.load(state, storage_reader=CheckpointStorageReader(checkpoint))
    check_dtensors(state, expected)
    assert state["rng_state/shard_0.1_2.2"][0]["tp"] == 1
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: iteration\."):
        dcp.load({"iteration": 0}, storage_reader=CheckpointStorageReader(checkpoint))


__all__ = ["GOLDEN", "copy_as_step", "load_by_adapters", "load_by_manager", "load_by_reader"]

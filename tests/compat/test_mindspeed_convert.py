"""MindSpeed-LLM's conversion of a checkpoint of torch.distributed.checkpoint to a plain state dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardckpt import dist_checkpointing as dc
from shardckpt.compat.mindspeed import dcp_to_torch_state_dict
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt_torch_dist import CheckpointStorageWriter
from tests.interop.sample import check_equal
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _state() -> dict[str, Any]:
    return {
        "model": {"layers.0.weight": torch.arange(6.0).reshape(2, 3), "layers.0.bias": torch.ones(3).bfloat16()},
        "optimizer": {
            "state": {"layers.0.weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "params": ["layers.0.weight"], "foreach": None}],
        },
        "mixed": [torch.ones(1), {"seed": 5}, torch.zeros(2, dtype=torch.int64)],
        "top.level": torch.ones(2),
        "epoch": 3,
    }


@table("writer", [dcp.FileSystemWriter, CheckpointStorageWriter])
def test_a_checkpoint_nests_as_torchs_converter_nests_it(tmp_path: Path, writer: Any) -> None:
    """What dcp.save flattened are the dicts and lists that were saved, as in the file of torch's own converter."""
    dcp.save(_state(), storage_writer=writer(tmp_path / "c"))
    dcp_to_torch_save(tmp_path / "c", tmp_path / "torch.pt")
    found = dcp_to_torch_state_dict(save_checkpoint_path=tmp_path / "c")
    check_equal(found, torch.load(tmp_path / "torch.pt", weights_only=False), "state")
    check_equal(found, _state(), "state")


def test_a_checkpoint_without_paths_has_keys(tmp_path: Path) -> None:
    """What dist_checkpointing.save wrote has its keys, with objects and the common state beside the tensors."""
    weight = ShardedTensor.from_rank_offsets("model.w", torch.ones(2))
    dc.save({"w": weight, "rng": ShardedObject("rng", {"seed": 1}, (1,), (0,)), "step": 7}, tmp_path / "c")
    found = dcp_to_torch_state_dict(tmp_path / "c")
    check_equal(found, {"model.w": torch.ones(2), "rng": {"seed": 1}, "step": 7}, "state")

"""Tensors without a rule that are left out by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from shardckpt import ShardedTensor, dist_checkpointing
from shardckpt.huggingface import Rule, RuleMapping, export_to_huggingface

if TYPE_CHECKING:
    from pathlib import Path


def test_a_tensor_that_is_left_out_needs_no_rule(tmp_path: Path) -> None:
    """A strict mapping does not refuse a tensor without a rule that is left out by name."""
    state = {key: ShardedTensor.from_rank_offsets(key, torch.arange(4.0)) for key in ("a", "odd")}
    dist_checkpointing.save(state, tmp_path / "step-1")
    mapping = RuleMapping([Rule("a", ("b",))])
    export_to_huggingface(tmp_path / "step-1", tmp_path / "hub", mapping=mapping, strict=True, leave_out=["odd"])
    assert load_file(tmp_path / "hub" / "model.safetensors").keys() == {"b"}

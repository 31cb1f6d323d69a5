"""Every way in which torch spreads a model: its optimizer goes on with state that is laid out by the model alone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.optimizer_state import load_sharded_optimizer_state_dict
from tests.adapters.models import made_model, train
from tests.adapters.modules import parallelize

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

BEFORE, AFTER = 2, 2
#: What state of a weight is, by the way in which the model is spread.
KINDS: dict[str, Any] = {"fsdp1": ShardedTensor, "tp": DTensor, "hsdp": DTensor, "ddp": torch.Tensor}


def _started(kind: str, seed: int, lr: float) -> tuple[Any, torch.optim.Optimizer, int]:
    model = parallelize(made_model(seed), kind)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=lr, weight_decay=0.1), 2 if kind == "tp" else 1


def _save_and_go_on(folder: Path) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")  # torch's of FSDP1
    losses = {}
    for kind in KINDS:
        model, optimizer, alike = _started(kind, seed=1, lr=0.02)
        train(model, optimizer, 0, BEFORE, alike=alike)
        dist_checkpointing.save(to_sharded_state_dict(model, optimizer), folder / kind)
        losses[kind] = train(model, optimizer, BEFORE, AFTER, alike=alike)
    return losses


def _resume(folder: Path) -> dict[str, list[float]]:
    """Each kind goes on with what the kind before it saved."""
    warnings.simplefilter("ignore")
    losses, kinds = {}, list(KINDS)
    for number, kind in enumerate(kinds):
        source = folder / kinds[number - 1]
        model, optimizer, alike = _started(kind, seed=2, lr=0.5)
        load_into(dist_checkpointing.load(to_sharded_state_dict(model, prefix="model."), source), model)
        params = get_model_state_dict(model)
        found = load_sharded_optimizer_state_dict(params, "optimizer", source)["optimizer"]
        weight = found["state"]["0.up.weight"]["exp_avg"]
        assert type(weight) is KINDS[kind] is type(params["0.up.weight"])
        set_optimizer_state_dict(model, optimizer, found)
        losses[kind] = train(model, optimizer, BEFORE, AFTER, alike=alike)
    return losses


def test_one_parallelism_goes_on_as_another(ranks: Ranks, tmp_path: Path) -> None:
    """FSDP1, FSDP2 over tensor parallelism, hybrid sharding and DDP, each with what another saved, by 4 ranks or 2."""
    expected = ranks.run(4, _save_and_go_on, tmp_path)[0]

    for count in (4, 2):
        for found in ranks.run(count, _resume, tmp_path):
            for kind, losses in found.items():
                assert losses == pytest.approx(expected[kind], rel=1e-12), kind
    assert expected["tp"][1] < expected["tp"][0]

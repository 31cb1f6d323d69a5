"""Trainings of plain DCP, converted: our loads and managers resume them, as they resume the folder itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.maintenance import convert_checkpoint
from shardckpt.manager import CheckpointConfig, CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path


class _Counting(torch.optim.SGD):
    """An optimizer whose state has a number, which DCP stores as a value of its own."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 5
        return result


def _make(seed: int, kind: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    groups = [{"params": [param], "lr": 0.1 * seed * (n + 1)} for n, param in enumerate(model.parameters())]
    optimizer = kind(groups, weight_decay=0.01 * seed)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(seed):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def _describe(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything of a training that a resume must bring back, comparable."""
    states = [{k: torch.as_tensor(v) for k, v in optimizer.state[p].items()} for p in model.parameters()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return (
        [p.detach().tolist() for p in model.parameters()],
        groups,
        [{k: v.tolist() for k, v in s.items()} for s in states],
    )


@pytest.mark.parametrize("to", ["torch_dist", "safetensors", "dcp"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, _Counting], ids=["AdamW", "numbers"])
def test_a_converted_training_resumes(tmp_path: Path, to: str, flat: bool, kind: Any) -> None:
    """Weights, moments, numbers in the state, options of each group and the schedule, by load and by a manager."""
    model, optimizer, schedule = _make(1, kind)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    saved = {"model": weights, "optim": moments, "sched": schedule.state_dict(), "step": 7}
    dcp.save(saved, checkpoint_id=str(tmp_path / "old"))
    convert_checkpoint(tmp_path / "old", tmp_path / "run" / "step-7", to, rename={"optim": "optimizer"})

    other = _make(2, kind)
    load_into(dc.load(to_sharded_state_dict(*other[:2]), tmp_path / "run" / "step-7"), *other[:2])
    assert _describe(*other[:2]) == _describe(model, optimizer)

    other = _make(2, kind)
    states = {"model": other[0], "optimizer": other[1], "sched": other[2]}
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "run")), states) as manager:
        assert manager.load()
    assert _describe(*other[:2]) == _describe(model, optimizer)
    assert other[2].state_dict() == schedule.state_dict()
